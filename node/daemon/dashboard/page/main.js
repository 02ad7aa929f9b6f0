// Puts the page together and keeps it current.

const stream = new Stream();
const frames = new Frames();
const focus = new Focus();
const timeline = new Timeline(stream.rounds);
const header = new Header();

readColours();
const threads = new Threads(frames, focus);
const curves = [new LossCurve(timeline, frames, stream), agreementCurve(timeline, frames), stalenessCurve(timeline, frames)];
const matrix = new Matrix(timeline, frames, focus);
const ruler = new Ruler(timeline, frames);
const strips = [...curves, matrix, ruler];
const inspector = new Inspector();
const members = membersTable(focus);
const links = linksTable((id) => (stream.state.members.find((m) => m.id === id) ? nameOf(stream.state.members.find((m) => m.id === id)) : shortId(id)));

function showState() {
  const { state, rounds } = stream;
  header.update(state, rounds);
  threads.update(state);
  inspector.show(state, focus);
  matrix.update(state);
  members.update(state.members); // those that matter most first
  links.update(state.links);
  const listed = state.known > state.members.length ? `, of which these ${whole(state.members.length)} matter most` : "";
  setText(byId("members-summary"), plural(state.known, "member") + listed + (state.model.admission === "open" ? ", open to anybody" : state.model.admission === "invited" ? ", by invitation" : ""));
  setHidden(byId("links-table"), !state.links.length);
  setText(byId("links-summary"), state.links.length ? plural(state.links.length, "link") : "none: this node is not connected to any other");
  showAlone(state);
}

function showAlone(state) {
  const alone = state.members.length < 2;
  setHidden(byId("graph-empty"), !alone);
  if (!alone) return;
  const [text, command] = joiningInWords(state);
  setText(byId("graph-empty-text"), text);
  setText(byId("graph-empty-command"), command);
}

function showRounds({ fresh, from, to }) {
  const { rounds } = stream;
  const none = rounds.list.length === 0;
  setHidden(byId("rounds-empty"), !none);
  for (const part of ["strips", "tools", "readout"]) setHidden(byId(part), none);
  setText(byId("rounds-empty"), stream.complete ? "No round has a delta yet. The first appears when a node has finished its first window of inner steps." : "");
  setText(byId("rounds-summary"), none ? "" : `${whole(rounds.first)} to ${whole(rounds.newest)}, ${plural(rounds.deltas, "delta")}${stream.complete ? "" : ", older ones are loading …"}`);
  matrix.forget(from, to);
  if (stream.state) {
    matrix.update(stream.state);
    header.update(stream.state, rounds);
  }
  for (const strip of strips) strip.refresh();
  threads.show(fresh);
}

const touched = matchMedia("(hover: none)").matches;
setText(byId("graph-hint"), touched ? "Touch a node for its figures." : "Point at a node, or use the arrow keys.");
const HINT = touched
  ? "Touch a round for its figures, drag to move."
  : "Point at a round for its figures. Drag to move, Ctrl and wheel to zoom; arrow keys, + and − work in the contributions.";
const SPANS = [[32, "32"], [128, "128"], [1024, "1,024"], [Infinity, "All"]];
const pressSpan = choice(byId("span"), SPANS.map(([n, label]) => [n, label, n === Infinity ? "All rounds kept" : `The latest ${label} rounds`]), timeline.span, (span) => timeline.show(span));
choice(byId("axis"), [[false, "by round"], [true, "by tokens"]], false, (byTokens) => timeline.setByTokens(byTokens));
const SCALES = ["linear", "log"];
const setScale = (scale) => curves[0].setLog(scale === "log");
choice(byId("scale"), [["linear", "linear"], ["log", "log", "Stays linear where a loss is 0 or less"]], remembered("scale", SCALES), (scale) => {
  remember("scale", scale);
  setScale(scale);
});
setScale(remembered("scale", SCALES));
legend(byId("loss-keys"), [["line thick swarm", "swarm, the median"], ["line accent", "this node"], ["diamond good", "held-out, averaged model"], ["diamond pale", "held-out, live model"]]);
legend(byId("matrix-keys"), [["cell accent", "merged"], ["cell warn", "late"], ["cell clip", "clipped"], ["cell frame bad", "void"]]);
legend(byId("graph-legend"), [
  ["dot accent", "alive, larger is faster"], ["dot warn dashed", "suspect"], ["dot hollow bad crossed", "down"], ["dot hollow faint", "left"],
  ["dot hollow accent", "does not train"], ["dot accent self", "this node"], ["dot accent differs", "≠ replica differs"],
  ["line accent", "own link"], ["line thread", "others' link"],
], "li");

stream.addEventListener("state", showState);
stream.addEventListener("rounds", (event) => showRounds(event.detail));
stream.addEventListener("notices", () => showEvents(stream.notices));
stream.addEventListener("connection", () => header.connection(stream));
stream.addEventListener("second", () => stream.connection !== "live" && header.connection(stream));
focus.addEventListener("member", () => stream.state && inspector.show(stream.state, focus));
timeline.addEventListener("range", () => pressSpan(timeline.end === null ? timeline.span : NaN));
timeline.addEventListener("cursor", () => setText(byId("readout"), timeline.cursor === null || timeline.quiet ? HINT : roundInWords(timeline).join("; ")));
startTheme(() => {
  readColours();
  threads.refresh();
  for (const strip of strips) strip.refresh();
});
showEvents([]);
setText(byId("readout"), HINT);
showRounds({ fresh: [], from: 0, to: Infinity });
stream.start();

// What tests and the curious may read; nothing here changes the page.
Object.defineProperty(window, "gossamer", {
  value: Object.freeze({
    get connection() { return stream.connection; },
    get state() { return structuredClone(stream.state); },
    get complete() { return stream.complete; },
    get rounds() { return { count: stream.rounds.list.length, first: stream.rounds.first, last: stream.rounds.last, deltas: stream.rounds.deltas }; },
    get notices() { return structuredClone(stream.notices); },
    get view() { return { range: timeline.range, byTokens: timeline.byTokens, cursor: timeline.cursor, row: timeline.row }; },
    get graph() { return { nodes: threads.graph.nodes.map(({ id, x, y, radius, member }) => ({ id, x, y, radius, health: member.health })), edges: threads.graph.edges.map(({ a, b }) => [a.id, b.id]) }; },
    get curves() { return curves.map((curve) => ({ id: curve.canvas.id, rounds: curve.shown, ...curve.vertical })); },
    place: (curve, round) => curves[curve].placeOf(round),
    get matrix() { return { ...matrix.shown }; },
    cell: (member, round) => matrix.centerOf(member, round),
    get frames() { return frames.figures; },
  }),
});
