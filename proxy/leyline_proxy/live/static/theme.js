// Loaded before the first paint, so that a chosen theme doesn't flash.
(() => {
  const CHOICES = ["system", "light", "dark"];
  let chosen = "system";
  try {
    chosen = localStorage.getItem("leyline.theme") || "system";
  } catch {
    // No storage: the choice lasts as long as the page.
  }
  const show = () => {
    if (!CHOICES.includes(chosen)) chosen = "system";
    document.documentElement.dataset.theme = chosen;
    const button = document.getElementById("theme-button");
    if (button) button.textContent = `Theme: ${chosen}`;
  };
  show();
  document.addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme-button").addEventListener("click", () => {
      chosen = CHOICES[(CHOICES.indexOf(chosen) + 1) % CHOICES.length];
      try {
        localStorage.setItem("leyline.theme", chosen);
      } catch {
        // As above.
      }
      show();
    });
  });
})();
