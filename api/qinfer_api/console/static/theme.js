// Applies the chosen theme before the page is painted; without a choice the system's holds.
"use strict";
try {
  const theme = localStorage.getItem("qinfer-theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
} catch { /* storage is forbidden: the system's theme holds */ }
