// The top of the page: which swarm, in which state, the figures at a glance, and whether this is live.

const STATES = {
  joining: "joining", starting: "starting", training: "training", serving: "serving", finished: "finished", leaving: "leaving",
};

/** How far the swarm is with the data that it goes through together. */
const dataInWords = ({ epoch, seen_once, seen_again, not_seen }) =>
  `epoch ${whole(epoch)}: ${percent(seen_once)} seen once, ${percent(seen_again)} again, ${percent(not_seen)} not yet`;

class Header {
  #figures;

  constructor() {
    const cards = ["round", "tokens", "speed", "loss", "replicas", "traffic"];
    this.#figures = new Map(cards.map((key) => [key, figure()]));
    byId("figures").append(...[...this.#figures.values()].map(({ box }) => box));
  }

  update(state, rounds) {
    const { model, trainer } = state;
    setText(byId("swarm"), state.swarm || shortId(state.swarm_id));
    setText(byId("subtitle"), [
      model.task, `${amount(model.parameters)} parameters`, plural(model.fragments, "fragment"), model.codec,
      model.averaging.join(", "), state.window ? `windows of ${plural(state.window, "step")}` : `a delta every ${model.pace}`, state.turn > 1 ? `members in one round of ${state.turn.toFixed(1)}` : "", model.admission === "invited" ? "invited members only" : "",
    ].filter(Boolean).join(" · "));
    setAttribute(byId("subtitle"), "title", state.window_why ? `windows of ${plural(state.window, "step")} ${state.window_why}` : null);
    const chip = byId("state");
    setHidden(chip, false);
    setText(chip, `${nameOf(itselfOf(state))} is ${STATES[state.state] ?? state.state}`);
    setAttribute(chip, "data-state", state.state);
    document.title = `${state.swarm || "Gossamer"}: round ${whole(state.round)}${known(trainer.loss) ? `, loss ${lossText(trainer.loss)}` : ""}`;
    this.#show(state, rounds);
    this.#progress(state);
    setText(byId("footer"), `Gossamer ${state.release}, swarm ${shortId(state.swarm_id)}, node ${shortId(state.node_id)}, up ${duration(state.uptime_s)}, folder ${state.folder}`);
  }

  #show(state, rounds) {
    const { trainer, links } = state;
    const behind = state.rounds_behind ? `, ${plural(state.rounds_behind, "round")} to merge` : "";
    const heard = (x) => (x || state.state !== "joining" ? x : null); // a joiner's zeros mean that it has heard of none
    const at = state.trains ? [whole(heard(state.round)), `swarm at ${whole(heard(state.clock))}`] : [whole(heard(state.clock)), "of the swarm"];
    this.#set("round", "Round", at[0], at[1] + behind);
    this.#set("tokens", "Tokens", amount(state.swarm_tokens), state.data ? dataInWords(state.data) : ownTokens(state), "", state.data ? ownTokens(state) : "");
    this.#set("speed", "Tokens per second", amount(state.swarm_tokens_per_s), state.trains ? speedInWords(trainer) : "of the whole swarm");
    const newest = rounds.newestRound;
    const own = known(trainer.loss);
    this.#set("loss", own ? "Loss" : "Loss of the swarm", lossText(own ? trainer.loss : newest?.loss),
      known(trainer.val_loss) ? `held-out ${bothLosses(trainer)}` : "held-out not measured here");
    this.#replicas(state);
    const sum = (key) => links.reduce((total, link) => total + (link[key] ?? 0), 0);
    this.#set("traffic", "Network", `↓ ${byteRate(sum("received_per_s"))}`, `↑ ${byteRate(sum("sent_per_s"))}, ${plural(links.length, "link")}`);
  }

  /** Ours is one of the replicas: with three others that are the same, four are identical. */
  #replicas({ replicas, same_at, sealed_round, sealed_digest, state }) {
    const { same = 0, other = 0, records = 0, unknown = 0 } = replicas;
    const others = same + other + records + unknown;
    if (unknown === others) {
      const why = state === "joining" ? "not known until it has joined" : others ? "nothing to compare yet" : "nobody to compare with";
      return this.#set("replicas", "Replicas", UNKNOWN, why + (sealed_round ? `, last sealed round ${whole(sealed_round)}` : ""));
    }
    const notes = same ? [`identical ${atRounds(same_at)}`] : [];
    if (other) notes.push(plural(other, "differs", "differ"));
    if (records) notes.push(`${whole(records)} with other records`);
    if (unknown) notes.push(`${whole(unknown)} not known yet`);
    this.#set("replicas", "Replicas", `${whole(1 + same)} of ${whole(1 + others)}`, notes.join(", "),
      other ? "bad" : records || unknown ? "" : "good", known(sealed_digest) ? `digest ${sealed_digest}` : "");
  }

  #progress(state) {
    const joining = state.state === "joining" || state.state === "starting";
    setHidden(byId("progress"), !joining);
    if (!joining) return;
    const bar = byId("progress-bar");
    setHidden(bar, !state.fetching);
    if (state.fetching) {
      const [have, total] = state.fetching;
      setAttribute(bar, "aria-valuemax", String(total));
      setAttribute(bar, "aria-valuenow", String(have));
      bar.firstElementChild.style.transform = `scaleX(${total ? have / total : 0})`;
      setText(byId("progress-text"), `Fetching the model: ${whole(have)} of ${plural(total, "chunk")}, checked one by one.`);
    } else if (state.state === "starting") {
      setText(byId("progress-text"), "Up to date with the swarm. The trainer is starting.");
    } else if (!state.links.length) {
      setText(byId("progress-text"), "Looking for the swarm: no node has answered yet.");
    } else {
      const missing = state.payloads_missing ? `, ${plural(state.payloads_missing, "payload")} still to come` : "";
      setText(byId("progress-text"), `Catching up with the swarm: ${plural(state.records, "record")} known${missing}.`);
    }
  }

  connection(stream) {
    setAttribute(document.body, "data-connection", stream.connection);
    const { connection } = stream;
    setText(byId("live-text"), { live: "live", lost: "reconnecting …", waiting: "connecting …" }[connection]);
    const banner = byId("banner");
    const since = (from) => duration(Math.max(1, (performance.now() - from) / 1000));
    if (connection !== "live" && stream.refused) {
      setText(banner, "The node requires a token that this page does not have: open the page with ?token=... at the end of its address.");
    } else if (connection === "waiting" && stream.answers) {
      setText(banner, "The node answers but has no room for this page yet: too many pages are open. Trying again …");
    } else if (connection === "lost") {
      setText(banner, `No connection to the node for ${since(stream.lostAt)}. Reconnecting … The figures are from ${when(stream.state.time)}.`);
    } else if (connection === "waiting" && stream.lostAt !== null) {
      setText(banner, "The node does not answer. Trying again …");
    }
    setHidden(banner, connection === "live" || stream.lostAt === null);
  }

  #set(key, title, value, note, mark = "", hint = "") {
    const { box, parts } = this.#figures.get(key);
    [title, value, note].forEach((text, i) => setText(parts[i], text));
    setAttribute(box, "data-mark", mark || null);
    setAttribute(box, "title", hint || null);
  }
}

function swarmInWords(state) {
  const by = (health) => state.by_health[health] ?? 0;
  const parts = [`${whole(1 + by("alive"))} of ${plural(state.known, "member")} alive`];
  for (const health of ["suspect", "down", "left"]) if (by(health)) parts.push(`${by(health)} ${health}`);
  if (state.known > state.members.length) parts.push(`${whole(state.members.length)} shown`);
  parts.push(`${plural(state.edges.length, "known link")}`);
  return parts.join(", ");
}

/** Replicas are compared pair by pair, each at the newest round that both have sealed. */
function atRounds([oldest, newest]) {
  if (oldest !== newest) return `at rounds ${whole(oldest)} to ${whole(newest)}`;
  return newest ? `at round ${whole(newest)}` : "at the start";
}

function ownTokens({ trains, trainer }) {
  if (!trains) return "this node does not train";
  return known(trainer.tokens) ? `${amount(trainer.tokens)} from this node` : "not known yet";
}

/** Held-out losses, first that of the model that one uses. */
function bothLosses({ val_loss, val_loss_average }) {
  return (known(val_loss_average) ? `${lossText(val_loss_average)} averaged, ` : "") + `${lossText(val_loss)} live`;
}

/** How others come to a node that is alone, and the command for it, which there is once it has an address. */
function joiningInWords({ state, addresses, model, swarm_id }) {
  const address = state === "joining" ? null : addresses[0];
  if (!address) return ["No other node has answered yet.", ""];
  if (model.admission === "invited") return ["Nobody else is here yet. An owner invites another machine with", `gossamer invite NODE_ID --join ${address}`];
  return ["Nobody else is here yet. Another machine joins with", `gossamer node --join ${address} --swarm-id ${swarm_id.slice(0, 12)}`];
}

function speedInWords(trainer) {
  if (!known(trainer.tokens_per_s)) return "not known yet";
  const waiting = trainer.wait_fraction > 0.005 ? `, waiting ${percent(trainer.wait_fraction)}` : "";
  return `${amount(trainer.tokens_per_s)} here${waiting}`;
}

function figure() {
  const parts = [el("h3"), el("p", { className: "value" }), el("p", { className: "quiet" })];
  return { box: el("div", { className: "figure" }, ...parts), parts };
}

const THEMES = ["auto", "light", "dark"];
/** The toggle: as the system, light, dark. */
function startTheme(changed) {
  const button = byId("theme");
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    setText(button, `Colours: ${theme}`);
    changed();
  };
  let theme = remembered("theme", THEMES);
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    remember("theme", theme);
    apply(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  apply(theme);
}
