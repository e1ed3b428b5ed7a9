// The page of claims: a box above the tables leaves the claims that hold every word typed into it.
document.addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("claims-filter");
  if (!box) return;
  const tables = [...document.querySelectorAll("article table")].filter(
    (table) => table.querySelector("th").textContent === "claim",
  );
  const claims = [...tables.flatMap((table) => [...table.tBodies[0].rows]), ...document.querySelectorAll("article details")];
  box.hidden = false;
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/);
    for (const claim of claims) {
      const text = claim.textContent.toLowerCase();
      claim.hidden = !words.every((word) => text.includes(word));
    }
  });
});
