// Runs before anything is drawn: apply the stored choice of light or dark, if any.
"use strict";
try {
  const theme = localStorage.getItem("tallybook-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* no storage: use the system's setting */ }
