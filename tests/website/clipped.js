// Text and pictures of the page that reach beyond what can be seen, and that no scrolling brings back: [what, by how
// many pixels]. What scrolls inside itself is whole, if it can be seen itself.
(() => {
  const room = (element) => {
    // the left and right end of what can be seen of an element's content
    let [left, right] = [0, document.documentElement.clientWidth];
    for (let outer = element; outer; outer = outer.parentElement) {
      const style = getComputedStyle(outer);
      if (style.position === "fixed" || style.display === "none") return [-Infinity, Infinity];
      const box = outer.getBoundingClientRect();
      if (outer !== element && ["auto", "scroll"].includes(style.overflowX)) return [-Infinity, Infinity];
      if (outer !== element && ["hidden", "clip"].includes(style.overflowX)) {
        [left, right] = [Math.max(left, box.left), Math.min(right, box.right)];
      }
    }
    return [left, right];
  };
  const found = [];
  const shown = "main :is(p, li, td, th, pre, code, table, img, svg, canvas, h1, h2, h3, .katex-html, figure, button)";
  for (const element of document.querySelectorAll(shown)) {
    const box = element.getBoundingClientRect();
    if (box.width < 2 || box.height < 2) continue;
    const [left, right] = room(element);
    const style = getComputedStyle(element);
    const cut = style.overflowX === "visible" || style.display === "inline" ? 0 : ["auto", "scroll"].includes(style.overflowX) ? 0 : element.scrollWidth - element.clientWidth;
    const beyond = Math.max(box.right - right, left - box.left, cut);
    if (beyond > 1.5) found.push([`${element.tagName} ${element.textContent.trim().slice(0, 50)}`, Math.round(beyond)]);
  }
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (wide > 1) found.push(["the page itself", wide]);
  return found;
})();
