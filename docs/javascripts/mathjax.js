window.MathJax = {
  tex: {
    inlineMath: [["\\(", "\\)"]],
    displayMath: [["\\[", "\\]"]],
    processEscapes: true,
    processEnvironments: true,
  },
  options: {
    ignoreHtmlClass: ".*|",
    processHtmlClass: "arithmatex",
  },
};

// Material swaps pages without a reload when instant navigation is on, so typeset after each swap.
document$.subscribe(() => {
  MathJax.startup?.output?.clearCache?.();
  MathJax.typesetClear?.();
  MathJax.texReset?.();
  MathJax.typesetPromise?.();
});
