// What reaches beyond what can be seen, and no scrolling brings back: [what, by how many pixels]. Something that scrolls
// inside itself is whole, if it can be seen itself.
(() => {
  const SHOWN = "main :is(p, li, td, th, pre, code, table, img, svg, canvas, h1, h2, h3, figure, button, .katex-html)";
  const scrolls = (style) => ["auto", "scroll"].includes(style.overflowX);
  const cuts = (style) => ["hidden", "clip"].includes(style.overflowX) && style.display !== "inline";

  // Where what is in an element may be: within the window and within all that is around it and cuts, up to what scrolls.
  const rooms = new Map([[null, [0, document.documentElement.clientWidth]]]);
  function room(outer) {
    if (!rooms.has(outer)) rooms.set(outer, within(outer));
    return rooms.get(outer);
  }

  function within(outer) {
    const style = getComputedStyle(outer);
    if (scrolls(style) || style.position === "fixed") return [-Infinity, Infinity];
    const [left, right] = room(outer.parentElement);
    if (!cuts(style)) return [left, right];
    const box = outer.getBoundingClientRect();
    return [Math.max(left, box.left), Math.min(right, box.right)];
  }

  function beyond(element) {
    const box = element.getBoundingClientRect();
    if (box.width < 2 || box.height < 2) return 0;
    const [left, right] = room(element.parentElement);
    const inside = cuts(getComputedStyle(element)) ? element.scrollWidth - element.clientWidth : 0;
    return Math.round(Math.max(box.right - right, left - box.left, inside) - 0.5);
  }

  const page = document.documentElement;
  const found = [...document.querySelectorAll(SHOWN)].map((e) => [`${e.tagName} ${e.textContent.trim().slice(0, 50)}`, beyond(e)]);
  return [...found, ["the page itself", page.scrollWidth - page.clientWidth]].filter(([, by]) => by > 1);
})();
