// A figure and its deviation, or its note in brackets, stay on one line of a phone; site.css has the style.
for (const cell of document.querySelectorAll("article td")) {
  if (/^[-+−\d.,]+( %)?( ± [\d.,]+)?( \([^)]{1,9}\))?$/.test(cell.textContent.trim())) cell.classList.add("figure")
}
