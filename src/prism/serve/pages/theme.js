// Apply the reader's choice of light or dark before the first paint. Without one, the system's setting holds.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("prism-theme");
  } catch {
    // Storage is off: the system's setting holds.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
