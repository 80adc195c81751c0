// Typesets what pymdownx.arithmatex marks: \( ... \) in a line, \[ ... \] on a line of its own.
// Without KaTeX in the site (see docs/npm/hook.py) formulas stay in TeX.
for (const element of window.katex ? document.querySelectorAll(".arithmatex") : []) {
  const [, open, formula] = element.textContent.trim().match(/^\\([([])(.*)\\[)\]]$/s);
  katex.render(formula, element, { displayMode: open === "[", throwOnError: false });
}
