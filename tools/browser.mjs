// Open every page of the built site in a browser, as wide as a phone and as a desk, and say what is wrong.
//
//     npm install --prefix /tmp/browser @sparticuz/chromium puppeteer-core    # once; outside the checkout
//     node tools/browser.mjs site /tmp/browser                                # every page
//     node tools/browser.mjs site /tmp/browser index.html mechanisms/rpc.html # these, with pictures of them
//
// Wrong are: a page wider than the window, a part that is cut and does not scroll, a formula that is not drawn,
// an image that is missing, an error of a script, anything that is fetched from elsewhere.
import fs from "node:fs"
import { createRequire } from "node:module"
import path from "node:path"

const [site, packages, ...names] = process.argv.slice(2)
const load = async (name) => (await import(createRequire(path.resolve(packages, "x")).resolve(name))).default
const [chromium, puppeteer] = [await load("@sparticuz/chromium"), await load("puppeteer-core")]
const root = path.resolve(site)
const pages = names.length ? names : fs.readdirSync(root, { recursive: true }).filter((name) => name.endsWith(".html"))

function wrong(width) {
  const scrolls = (part) => {
    for (let around = part; around !== document.body; around = around.parentElement)
      if (/auto|scroll/.test(getComputedStyle(around).overflowX)) return true
    return false
  }
  const cut = [...document.querySelectorAll("article *")].filter((part) => {
    const { right, height } = part.getBoundingClientRect()
    return height && right > width + 1 && !part.closest(".katex-mathml, svg, .md-search") && !scrolls(part)
  })
  return [
    ...cut.slice(0, 3).map((part) => `cut: ${part.tagName} ${part.textContent.trim().slice(0, 40)}`),
    ...[...document.images].filter((image) => !image.naturalWidth).map((image) => `no image: ${image.src}`),
    ...[...document.querySelectorAll(".arithmatex:not(:has(.katex)), .katex-error")].map((part) => `formula: ${part.textContent}`),
    ...(document.documentElement.scrollWidth > width ? [`${document.documentElement.scrollWidth} pixels wide`] : []),
  ]
}

const options = { executablePath: await chromium.executablePath(), headless: "shell" }
const browser = await puppeteer.launch({ ...options, args: [...chromium.args, "--allow-file-access-from-files"] })
const tab = await browser.newPage()
let found = []
tab.on("request", (request) => /^(file|data|blob):/.test(request.url()) || found.push(`elsewhere: ${request.url()}`))
tab.on("pageerror", (error) => found.push(error.message))
let count = 0
for (const name of pages)
  for (const [width, scheme] of [[390, "light"], [1440, "light"], ...(names.length ? [[390, "dark"], [1440, "dark"]] : [])]) {
    found = []
    await tab.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }])
    await tab.setViewport({ width, height: 1400, isMobile: width < 700 })
    await tab.goto(`file://${path.join(root, name)}`)
    found.push(...(await tab.evaluate(wrong, width)))
    if (names.length) await tab.screenshot({ path: path.join(packages, `${name.replaceAll("/", "_")}-${width}-${scheme}.png`) })
    for (const line of found) console.log(`${name}, ${width} pixels: ${line}`)
    count += found.length
  }
await browser.close()
process.exit(count ? 1 : 0)
