// Renders what pymdownx.arithmatex marked as TeX: \( .. \) in a line, \[ .. \] on lines of its own.
for (const element of document.querySelectorAll(".arithmatex")) {
  const source = element.textContent.trim()
  katex.render(source.slice(2, -2), element, {
    displayMode: source.startsWith("\\["),
    throwOnError: false,
  })
}
