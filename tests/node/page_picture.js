// Runs before the page's own script: keeps what is drawn on each canvas as SVG elements, too.
// It knows what the page uses, on a screen with one pixel to the CSS pixel.
(() => {
  const FAMILY = "Helvetica, Arial, sans-serif"; // of the same widths on most machines: words stay in their places
  const prototype = CanvasRenderingContext2D.prototype;
  const marks = new WeakMap(); // canvas -> the elements drawn since it was cleared
  const paths = new WeakMap(); // context -> its path's data

  const marksOf = (canvas) => marks.get(canvas) ?? [];
  const add = (context, ...elements) => marks.set(context.canvas, [...marksOf(context.canvas), ...elements]);
  const extend = (context, data) => paths.set(context, (paths.get(context) ?? "") + data);
  const short = (...numbers) => numbers.map((x) => Math.round(x * 10) / 10).join(" ");
  const escaped = (text) => text.replace(/[&<>]/g, (c) => `&#${c.charCodeAt(0)};`);

  /** Tells `note` of every call of a method, and of its context as the first argument. */
  function watch(name, note) {
    const method = prototype[name];
    prototype[name] = function (...values) {
      note(this, ...values);
      return method.apply(this, values);
    };
  }

  /** Lets `change` have every value before it is set. */
  function filter(owner, name, change) {
    const property = Object.getOwnPropertyDescriptor(owner, name);
    Object.defineProperty(owner, name, {
      ...property,
      set(value) { property.set.call(this, change(value, this)); },
    });
  }

  function look(context, fills) {
    const dash = context.getLineDash(), transform = context.getTransform();
    return [
      fills ? `fill="${context.fillStyle}"` : `fill="none" stroke="${context.strokeStyle}" stroke-width="${short(context.lineWidth)}"`,
      !fills && dash.length && `stroke-dasharray="${dash.join(" ")}"`,
      !fills && context.lineJoin === "round" && 'stroke-linejoin="round"',
      context.globalAlpha < 1 && `opacity="${context.globalAlpha.toFixed(2)}"`,
      !transform.isIdentity && `transform="${transform}"`,
    ].filter(Boolean).join(" ");
  }

  const rect = (context, fills, x, y, w, h) => add(context, `<rect x="${short(x)}" y="${short(y)}" width="${short(w)}" height="${short(h)}" ${look(context, fills)}/>`);
  const path = (context, fills) => add(context, `<path d="${paths.get(context)}" ${look(context, fills)}/>`);

  /** All arcs of the page are whole circles. */
  function circle(context, x, y, r) {
    const half = `a${short(r, r)} 0 1 0 `, across = 2 * short(r); // rounded once: it closes
    extend(context, `M${short(x - r, y)}${half}${across} 0${half}${-across} 0`);
  }

  function text(context, words, x, y) {
    const { textBaseline } = context;
    const ascent = context.measureText(words).actualBoundingBoxAscent;
    context.textBaseline = "alphabetic"; // the one that all viewers take to be the same
    y += context.measureText(words).actualBoundingBoxAscent - ascent;
    context.textBaseline = textBaseline;
    const [, weight, size] = context.font.match(/^(?:(\w+) )?([\d.]+)px/);
    const anchor = { right: "end", center: "middle" }[context.textAlign];
    add(context, `<text x="${short(x)}" y="${short(y)}" font-size="${size}"${weight ? ` font-weight="${weight}"` : ""}${anchor ? ` text-anchor="${anchor}"` : ""} ${look(context, true)}>${escaped(words)}</text>`);
  }

  /** Pixels as one path a colour: runs along a row, as far down as the rows below have the same. */
  function cells({ data, width, height }) {
    const pixels = new Uint32Array(data.buffer);
    const found = new Map(); // colour -> path data
    let open = new Map(); // "x width colour" of a run -> the row where it began
    for (let y = 0; y <= height; y++) {
      const runs = new Map();
      for (let x = 0, end; y < height && x < width; x = end) {
        const pixel = pixels[y * width + x];
        for (end = x + 1; end < width && pixels[y * width + end] === pixel;) end++;
        const run = `${x} ${end - x} ${pixel}`;
        if (pixel) runs.set(run, open.get(run) ?? y);
      }
      for (const [run, top] of open) {
        if (runs.has(run)) continue;
        const [x, w, pixel] = run.split(" ");
        found.set(pixel, `${found.get(pixel) ?? ""}M${x} ${top}h${w}v${y - top}h-${w}z`);
      }
      open = runs;
    }
    const colour = (pixel) => `rgb(${[...new Uint8Array(new Uint32Array([pixel]).buffer)].slice(0, 3)})`;
    return [...found].map(([pixel, data]) => `<path d="${data}" fill="${colour(pixel)}"/>`);
  }

  watch("beginPath", (context) => paths.delete(context));
  watch("moveTo", (context, x, y) => extend(context, `M${short(x, y)}`));
  watch("lineTo", (context, x, y) => extend(context, `${paths.has(context) ? "L" : "M"}${short(x, y)}`));
  watch("quadraticCurveTo", (context, ...points) => extend(context, `Q${short(...points)}`));
  watch("arc", circle);
  watch("fill", (context) => path(context, true));
  watch("stroke", (context) => path(context, false));
  watch("fillRect", (context, ...box) => rect(context, true, ...box));
  watch("strokeRect", (context, ...box) => rect(context, false, ...box));
  watch("fillText", text);
  watch("clearRect", ({ canvas }) => marks.delete(canvas)); // always all of it
  watch("putImageData", (context, image) => add(context, ...cells(image)));
  watch("drawImage", (context, source, x, y) => add(context, `<g transform="translate(${short(x, y)})">`, ...marksOf(source), "</g>"));
  filter(HTMLCanvasElement.prototype, "width", (width, canvas) => (marks.delete(canvas), width)); // setting it clears
  filter(prototype, "font", (font) => font.replace(/px .*/, `px ${FAMILY}`));
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(`:root { font-family: ${FAMILY}; }`);
  document.adoptedStyleSheets = [sheet];

  const answers = { "(hover: none)": "not all", "(prefers-reduced-motion: reduce)": "all" }; // a mouse, and no animation
  const ask = window.matchMedia.bind(window);
  window.matchMedia = (query) => ask(answers[query] ?? query);

  window.drawnOn = (id) => marksOf(document.getElementById(id)).join("");
})();
