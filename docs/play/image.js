// From strokes to an image as MNIST has them: the digit fills a box of 20×20 pixels, and its centre of mass is that of
// the 28×28 image. All images here are Float32Arrays of 784 numbers from 0 (background) to 1 (ink), row by row.

export const SIZE = 28;
const BOX = 20;
const FINE = 10; // small pixels per pixel and direction, averaged in the end
const INK = 2.3; // width of a stroke in pixels, about that of MNIST
const SMALLEST = 60; // strokes smaller than this on paper, such as a dot, are not enlarged to fill the box

// strokes: a list of lists of [x, y], in pixels of the paper
export function fromStrokes(strokes) {
  const points = strokes.flat();
  const [left, right] = range(points.map(([x]) => x));
  const [top, bottom] = range(points.map(([, y]) => y));
  const scale = (BOX - INK) / Math.max(right - left, bottom - top, SMALLEST);
  const middle = [(left + right) / 2, (top + bottom) / 2];
  const placed = (offset) =>
    strokes.map((stroke) => stroke.map((point) => point.map((p, i) => (p - middle[i]) * scale + SIZE / 2 + offset[i])));
  const mass = centreOfMass(drawn(placed([0, 0])));
  return averaged(drawn(placed(mass.map((m) => SIZE / 2 - m))));
}

export function noise() {
  return Float32Array.from({ length: SIZE * SIZE }, Math.random);
}

// Pixels of an image element or canvas, from `left` on
export function fromPicture(picture, left) {
  const context = surface(SIZE);
  context.drawImage(picture, left, 0, SIZE, SIZE, 0, 0, SIZE, SIZE);
  return inkOf(context);
}

export function show(image, canvas) {
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(SIZE, SIZE);
  image.forEach((ink, i) => pixels.data.set([255 * ink, 255 * ink, 255 * ink, 255], 4 * i));
  context.putImageData(pixels, 0, 0);
}

export function line(context, stroke, width) {
  context.lineWidth = width;
  context.lineCap = context.lineJoin = "round";
  context.strokeStyle = "white";
  context.beginPath();
  context.moveTo(...stroke[0]);
  for (const point of stroke) context.lineTo(...point); // the first again, so that a dot is drawn, too
  context.stroke();
}

function drawn(strokes) {
  const context = surface(SIZE * FINE);
  context.scale(FINE, FINE);
  for (const stroke of strokes) line(context, stroke, INK);
  return inkOf(context);
}

function surface(size) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "black";
  context.fillRect(0, 0, size, size);
  return context;
}

function inkOf(context) {
  const { width, height } = context.canvas;
  const { data } = context.getImageData(0, 0, width, height);
  return Float32Array.from({ length: width * height }, (_, i) => data[4 * i] / 255);
}

// In pixels of the 28×28 image, from one of SIZE * FINE
function centreOfMass(fine) {
  const side = SIZE * FINE;
  let [x, y, all] = [0, 0, 0];
  fine.forEach((ink, i) => {
    x += ink * ((i % side) + 0.5);
    y += ink * (Math.floor(i / side) + 0.5);
    all += ink;
  });
  return [x / all / FINE, y / all / FINE];
}

function averaged(fine) {
  const image = new Float32Array(SIZE * SIZE);
  const side = SIZE * FINE;
  fine.forEach((ink, i) => {
    const [column, row] = [Math.floor((i % side) / FINE), Math.floor(i / side / FINE)];
    image[row * SIZE + column] += ink / FINE ** 2;
  });
  return image;
}

function range(numbers) {
  return [Math.min(...numbers), Math.max(...numbers)];
}
