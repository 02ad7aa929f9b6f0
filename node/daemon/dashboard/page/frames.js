// Drawing: only what changed, only what is visible, at most once a frame; and how long it took.

class Frames {
  #views = new Map(); // view -> {dirty, visible}
  #scheduled = false;
  #times = []; // ms of script in each frame, the latest 240

  /** `view.draw(now)` draws and returns whether it wants another frame; `view.canvas` is watched. */
  add(view) {
    const entry = { dirty: true, visible: true };
    this.#views.set(view, entry);
    new IntersectionObserver(([seen]) => {
      entry.visible = seen.isIntersecting;
      if (entry.visible && entry.dirty) this.#schedule();
    }, { rootMargin: "100px" }).observe(view.canvas);
    new ResizeObserver(() => this.invalidate(view)).observe(view.canvas);
    this.invalidate(view);
  }

  invalidate(...views) {
    for (const view of views) this.#views.get(view).dirty = true;
    this.#schedule();
  }

  #schedule() {
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame((now) => this.#frame(now));
  }

  #frame(now) {
    this.#scheduled = false;
    const began = performance.now();
    let again = false;
    for (const [view, entry] of this.#views) {
      if (!entry.dirty || !entry.visible) continue;
      entry.dirty = view.draw(now) === true;
      again ||= entry.dirty;
    }
    this.#times.push(performance.now() - began);
    if (this.#times.length > 240) this.#times.shift();
    if (again) this.#schedule();
  }

  /** Milliseconds of script a frame, over the latest frames. */
  get figures() {
    const sorted = [...this.#times].sort((a, b) => a - b);
    const at = (share) => (sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null);
    return { frames: sorted.length, median_ms: at(0.5), p95_ms: at(0.95), max_ms: at(1) };
  }
}

/** A canvas' context in CSS pixels, its bitmap at the screen's resolution: [context, width, height]. */
function surface(canvas) {
  const ratio = Math.min(devicePixelRatio || 1, 3);
  const width = canvas.clientWidth, height = canvas.clientHeight;
  const w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}

/** The style sheet's colours for canvases, read anew when the theme changes. */
const colours = {};
function readColours() {
  const probe = el("span", { hidden: true });
  document.body.append(probe);
  for (const name of ["ink", "muted", "faint", "line", "thread", "surface", "accent", "swarm", "good", "pale", "warn", "bad", "clip", "cell"]) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Inter", "Helvetica Neue", sans-serif';
const font = (size, weight = 400) => `${weight} ${size}px ${FONT}`;
const stillness = matchMedia("(prefers-reduced-motion: reduce)");
