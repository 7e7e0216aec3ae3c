// Before anything is drawn: the choice of light or dark that was made here, if any.
"use strict";
try {
  const theme = localStorage.getItem("tallybook-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* no storage: what the system says */ }
