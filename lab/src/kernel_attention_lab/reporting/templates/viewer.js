"use strict"
for (const viewer of document.querySelectorAll(".viewer")) {
  const find = (selector) => viewer.querySelector(selector)
  const [select, pane, sheet, box, output] = ["select", ".pane", ".sheet", ".cell", "output"].map(find)
  const maps = [...sheet.querySelectorAll("img")]
  let map, pixels, zoom, cell

  const pixelsOf = (image) => {
    const canvas = document.createElement("canvas")
    canvas.width = image.naturalWidth
    canvas.height = image.naturalHeight
    const context = canvas.getContext("2d", { willReadFrequently: true })
    context.drawImage(image, 0, 0)
    return context.getImageData(0, 0, canvas.width, canvas.height).data
  }
  const color = (data, place) => data.slice(4 * place, 4 * place + 3).join()
  const number = (value) => String(Number(value.toPrecision(3))).replace("-", "−")

  const places = (name, index, count) => {
    const first = index * Number(map.dataset.block)
    const last = Math.min(first + Number(map.dataset.block), Number(count)) - 1
    return first === last ? `${name} ${first}` : `${name} ${first} to ${last}`
  }

  const point = (row, column) => {
    const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1)
    cell = [clamp(row, map.naturalHeight), clamp(column, map.naturalWidth)]
    Object.assign(box.style, {
      top: `${cell[0] * zoom}px`, left: `${cell[1] * zoom}px`, width: `${zoom}px`, height: `${zoom}px`,
    })
    box.hidden = false
    const level = levels.get(color(pixels, cell[0] * map.naturalWidth + cell[1]))
    const [low, high] = [Number(map.dataset.low), Number(map.dataset.high)]
    const value = level === undefined ? "" : `: about ${number(low + (level / (levels.size - 1)) * (high - low))}`
    const { row: rowName, column: columnName, rows, columns } = map.dataset
    output.textContent = `${places(rowName, cell[0], rows)}, ${places(columnName, cell[1], columns)}${value}`
  }

  // The cell under (x, y) of the window stays there.
  const zoomTo = (wanted, x = pane.clientWidth / 2, y = pane.clientHeight / 2) => {
    const before = zoom
    zoom = Math.min(Math.max(wanted, 0.5), 64)
    map.style.width = sheet.style.width = `${map.naturalWidth * zoom}px`
    map.style.height = sheet.style.height = `${map.naturalHeight * zoom}px`
    pane.scrollLeft = ((pane.scrollLeft + x) / before) * zoom - x
    pane.scrollTop = ((pane.scrollTop + y) / before) * zoom - y
    if (cell) point(...cell)
  }
  const fit = () => {
    zoom ??= 1
    pane.style.height = ""
    zoomTo(Math.min(pane.clientWidth / map.naturalWidth, 480 / map.naturalHeight, 24))
    pane.style.height = `${Math.max(pane.offsetHeight, 160)}px`
  }
  const actions = { in: () => zoomTo(zoom * 1.5), out: () => zoomTo(zoom / 1.5), fit }

  const show = () => {
    for (const image of maps) image.hidden = true
    map = maps[select.selectedIndex]
    map.hidden = false
    pixels = pixelsOf(map)
    cell = undefined
    box.hidden = true
    output.textContent = ""
    find(".low").textContent = number(Number(map.dataset.low))
    find(".high").textContent = number(Number(map.dataset.high))
    fit()
  }

  const scale = find(".scale img")
  const levels = new Map()
  const start = () => {
    viewer.hidden = false
    const bar = pixelsOf(scale)
    for (let level = 0; level < scale.naturalWidth; level++) levels.set(color(bar, level), level)
    show()
  }

  select.addEventListener("change", show)
  for (const button of viewer.querySelectorAll("button")) {
    button.addEventListener("click", () => actions[button.dataset.zoom]())
  }
  pane.addEventListener("keydown", (event) => {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }
    const action = { "+": actions.in, "=": actions.in, "-": actions.out, 0: fit }[event.key]
    const step = steps[event.key]
    if (event.ctrlKey || event.metaKey || event.altKey || !(step || action)) return
    event.preventDefault()
    if (action) return action()
    point(...(cell ? [cell[0] + step[0], cell[1] + step[1]] : [0, 0]))
    box.scrollIntoView({ block: "nearest", inline: "nearest" })
  })
  sheet.addEventListener("pointermove", (event) => {
    const corner = sheet.getBoundingClientRect()
    point(Math.floor((event.clientY - corner.top) / zoom), Math.floor((event.clientX - corner.left) / zoom))
  })
  pane.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return
    event.preventDefault()
    const corner = pane.getBoundingClientRect()
    zoomTo(zoom * Math.exp(-event.deltaY / 300), event.clientX - corner.left, event.clientY - corner.top)
  }, { passive: false })
  Promise.all([scale, ...maps].map((image) => image.decode())).then(start)
}
