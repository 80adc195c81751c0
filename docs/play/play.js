// The page to play with. `digits.onnx` gives the ten outputs of the network (`mean`), how uncertain they are
// (`covariance`), and calibrated probabilities; `digits.json` has what the same file says about test images. Both are
// made by `python -m experiments.play`.

import { SIZE, fromPicture, fromStrokes, line, noise, show } from "./image.js";

const PAPER = 12; // width of a stroke on paper
const part = (name) => document.querySelector(`#play .play-${name}`);
const percent = (p) => `${Number((100 * p).toFixed(p < 0.01 || p > 0.99 ? 1 : 0))}%`; // 0.4%, 98%, 99.7%

async function start() {
  const [network, facts, pictures] = await Promise.all([loadNetwork(), loadFacts(), loadPictures()]);
  const bars = makeBars();
  drawScale(facts);
  let newest = 0;

  async function look(image) {
    const turn = ++newest;
    show(image, part("seen"));
    const found = await network(image);
    if (turn === newest) tell(found, facts, bars); // else there is a newer image already
  }

  const paper = makePaper((strokes) => look(fromStrokes(strokes)));
  part("clear").onclick = () => {
    paper.clear();
    newest += 1;
    show(new Float32Array(SIZE * SIZE), part("seen"));
    forget(bars);
  };
  const pick = (image) => {
    look(image);
    paper.copy(part("seen"));
  };
  part("noise").onclick = () => pick(noise());
  facts.pictures.forEach((picture, i) => {
    const image = fromPicture(pictures, SIZE * i);
    part(picture.kind).append(thumbnail(image, picture.name, () => pick(image)));
  });
  document.querySelectorAll("[data-fact]").forEach((e) => (e.textContent = facts.told[e.dataset.fact]));
  forget(bars);
  document.getElementById("play").dataset.ready = "";
}

// -- what is loaded

async function loadNetwork() {
  const address = new URL("../packages/onnxruntime-web/dist/ort.wasm.bundle.min.mjs", import.meta.url);
  const ort = await import(address).catch(() => {
    throw new Error("onnxruntime-web is not part of this build of the site: install npm, and run make docs again");
  });
  ort.env.wasm.numThreads = 1; // more would need special headers from the server
  const session = await ort.InferenceSession.create(new URL("digits.onnx", import.meta.url).href);
  return async (image) => {
    const found = await session.run({ x: new ort.Tensor("float32", image, [1, 1, SIZE, SIZE]) });
    const mean = [...found.mean.data];
    return {
      plain: softmax(mean),
      bayesian: [...found.probabilities.data],
      uncertainty: relative(mean, [...found.covariance.data]),
    };
  };
}

async function loadFacts() {
  return (await fetch(new URL("digits.json", import.meta.url))).json();
}

async function loadPictures() {
  const image = new Image();
  image.src = new URL("pictures.png", import.meta.url);
  await image.decode();
  return image;
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function softmax(logits) {
  const most = Math.max(...logits);
  const weights = logits.map((l) => Math.exp(l - most));
  return weights.map((w) => w / sum(weights));
}

// √(Σ Var[f_i - f_j] / Σ (m_i - m_j)²) over pairs of outputs, as in experiments/play/predictor.py
function relative(mean, covariance) {
  const n = mean.length;
  const middle = sum(mean) / n;
  const uncertain = sum(mean.map((_, i) => covariance[i * n + i])) - sum(covariance) / n;
  return Math.sqrt(uncertain / sum(mean.map((m) => (m - middle) ** 2)));
}

// -- drawing

function makePaper(onStrokes) {
  const canvas = part("paper");
  const context = canvas.getContext("2d");
  let strokes = [];

  function clear() {
    strokes = [];
    context.clearRect(0, 0, canvas.width, canvas.height);
  }
  function copy(picture) {
    clear();
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  }
  function extend(event) {
    const stroke = strokes.at(-1);
    const [wide, high] = [canvas.width / canvas.clientWidth, canvas.height / canvas.clientHeight];
    stroke.push([event.offsetX * wide, event.offsetY * high]);
    line(context, stroke.slice(-2), PAPER);
    onStrokes(strokes);
  }
  canvas.onpointerdown = (event) => {
    canvas.setPointerCapture(event.pointerId);
    if (strokes.length === 0) clear(); // a picture may be there
    strokes.push([]);
    extend(event);
  };
  canvas.onpointermove = (event) => canvas.hasPointerCapture(event.pointerId) && extend(event);
  return { clear, copy };
}

function thumbnail(image, name, onPick) {
  const button = document.createElement("button");
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIZE;
  show(image, canvas);
  button.append(canvas);
  button.title = button.ariaLabel = name;
  button.type = "button";
  button.onclick = onPick;
  return button;
}

// -- what is shown

const cell = (kind) => `<span class="${kind}"><u><i></i></u><em></em></span>`; // a bar in its trough, and a number

function makeBars() {
  return Array.from({ length: 10 }, (_, digit) => {
    const row = part("bars").appendChild(document.createElement("div"));
    row.innerHTML = `<b>${digit}</b>${cell("plain")}${cell("bayesian")}`;
    return row;
  });
}

function tell(found, facts, bars) {
  for (const kind of ["plain", "bayesian"]) {
    const most = Math.max(...found[kind]);
    found[kind].forEach((p, digit) => {
      const cell = bars[digit].querySelector(`.${kind}`);
      cell.querySelector("i").style.width = `${100 * p}%`;
      cell.querySelector("em").textContent = percent(p);
      cell.classList.toggle("most", p === most);
    });
  }
  const below = facts.quantiles.filter((q) => q < found.uncertainty).length / facts.quantiles.length;
  part("verdict").textContent = verdict(found, below, facts);
  part("pointer").setAttribute("transform", `translate(${place(found.uncertainty, facts)} 0)`);
  part("pointer").style.display = "";
  Object.assign(document.getElementById("play").dataset, {
    digit: winner(found.bayesian),
    plain: Math.max(...found.plain),
    bayesian: Math.max(...found.bayesian),
    uncertainty: found.uncertainty,
    below,
  });
}

function verdict(found, below, facts) {
  const digit = winner(found.bayesian);
  const says = `Plain: ${winner(found.plain)}, ${percent(Math.max(...found.plain))} sure. Bayesian: ${digit}, ${percent(found.bayesian[digit])} sure. `;
  if (found.uncertainty <= facts.usual) return `${says}The network knows images like this one.`;
  return `${says}This is unlike the digits it knows: more uncertain than ${percent(below)} of the test digits.`;
}

function winner(probabilities) {
  return probabilities.indexOf(Math.max(...probabilities));
}

function forget(bars) {
  for (const cell of bars.flatMap((row) => [...row.querySelectorAll("span")])) {
    cell.querySelector("i").style.width = 0;
    cell.querySelector("em").textContent = "";
    cell.classList.remove("most");
  }
  part("verdict").textContent = "Draw a digit, or choose an image.";
  part("pointer").style.display = "none";
}

// -- the scale of the uncertainty: two histograms, 100 wide and 30 high, over its logarithm

const place = (uncertainty, { low, high }) =>
  Math.min(100, Math.max(0, (100 * Math.log(uncertainty / low)) / Math.log(high / low)));

function drawScale(facts) {
  for (const kind of ["digits", "fashion"]) {
    const counts = facts.histograms[kind];
    const most = Math.max(...counts);
    const corners = counts.flatMap((count, i) =>
      [i, i + 1].map((edge) => `${(100 * edge) / counts.length},${30 - (28 * count) / most}`),
    );
    part("scale").querySelector(`.${kind}`).setAttribute("points", ["0,30", ...corners, "100,30"].join(" "));
  }
  const usual = place(facts.usual, facts);
  part("usual").setAttribute("transform", `translate(${usual} 0)`);
  part("usual-words").style.marginLeft = `${usual}%`;
}

start().then(
  () => part("status").remove(),
  (error) => (part("status").textContent = `The network could not be loaded: ${error.message}.`),
);
