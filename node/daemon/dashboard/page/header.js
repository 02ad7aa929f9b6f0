// The top of the page: which swarm, in which state, the figures at a glance, and whether this is live.

const STATES = {
  joining: "joining", starting: "starting", training: "training", serving: "serving", finished: "finished", leaving: "leaving",
};

class Header {
  #figures;

  constructor() {
    const cards = ["round", "tokens", "speed", "loss", "replicas", "traffic"];
    this.#figures = new Map(cards.map((key) => [key, figure()]));
    byId("figures").append(...[...this.#figures.values()].map(({ box }) => box));
  }

  update(state, rounds) {
    const { swarm, node, now } = state;
    setText(byId("swarm"), swarm.name || shortId(swarm.id));
    setText(byId("subtitle"), [
      swarm.task, `${amount(swarm.parameters)} parameters`, plural(swarm.fragments, "fragment"), swarm.codec,
      (swarm.averaging ?? []).join(", "), swarm.pace ? `a delta every ${swarm.pace}` : "", swarm.admission === "invited" ? "invited members only" : "",
    ].filter(Boolean).join(" · "));
    const chip = byId("state");
    setHidden(chip, false);
    setText(chip, `${nameOf(node)} is ${STATES[node.state] ?? node.state}`);
    setAttribute(chip, "data-state", node.state);
    document.title = `${swarm.name || "Gossamer"}: round ${whole(now.round)}${known(now.loss) ? `, loss ${lossText(now.loss)}` : ""}`;
    this.#show(state, rounds);
    this.#progress(state);
    setText(byId("footer"), `Gossamer ${node.version ?? ""}, swarm ${shortId(swarm.id)}, node ${shortId(node.id)}, up ${duration(node.uptime_s)}, folder ${node.folder ?? UNKNOWN}`);
  }

  #show({ now, node, links, members }, rounds) {
    const behind = now.rounds_behind ? `, ${plural(now.rounds_behind, "round")} to merge` : "";
    const heard = (x) => (x || node.state !== "joining" ? x : null); // a joiner's zeros mean that it has heard of none
    const at = node.trains ? [whole(heard(now.round)), `swarm at ${whole(heard(now.clock))}`] : [whole(heard(now.clock)), "of the swarm"];
    this.#set("round", "Round", at[0], at[1] + behind);
    this.#set("tokens", "Tokens", amount(heard(now.swarm_tokens)), ownTokens(node, now));
    this.#set("speed", "Tokens per second", amount(now.swarm_tokens_per_s), node.trains ? speedInWords(now) : "of the whole swarm");
    const newest = rounds.newestRound;
    const own = known(now.loss);
    this.#set("loss", own ? "Loss" : "Loss of the swarm", lossText(own ? now.loss : newest?.loss),
      known(now.val_loss) ? `held-out ${lossText(now.val_loss)}` : "held-out not measured here");
    this.#replicas(now, members, node);
    const sum = (key) => links.reduce((total, link) => total + (link[key] ?? 0), 0);
    this.#set("traffic", "Network", `↓ ${byteRate(sum("received_per_s"))}`, `↑ ${byteRate(sum("sent_per_s"))}, ${plural(links.length, "link")}`);
  }

  /** Ours is one of the replicas: with three others that are the same, four are identical. */
  #replicas({ agree, sealed_round }, members, node) {
    const others = members.filter((m) => !m.self && isLive(m));
    if (!agree?.of) {
      const why = node.state === "joining" ? "not known until it has joined" : others.length ? "nothing to compare yet" : "nobody to compare with";
      return this.#set("replicas", "Replicas", UNKNOWN, why + (sealed_round ? `, last sealed round ${whole(sealed_round)}` : ""));
    }
    const by = (claim) => others.filter((m) => m.claim === claim).length;
    const [differ, apart, unknown] = [by("other"), by("records"), by(null)];
    const notes = [`identical ${atRounds(agree.rounds)}`];
    if (differ) notes.push(plural(differ, "differs", "differ"));
    if (apart) notes.push(`${whole(apart)} with other records`);
    if (unknown) notes.push(`${whole(unknown)} not known yet`);
    this.#set("replicas", "Replicas", `${whole(1 + by("same"))} of ${whole(1 + others.length)}`, notes.join(", "),
      differ ? "bad" : apart || unknown ? "" : "good", known(agree.digest) ? `digest ${agree.digest}` : "");
  }

  #progress({ node, now, links }) {
    const joining = node.state === "joining" || node.state === "starting";
    setHidden(byId("progress"), !joining);
    if (!joining) return;
    const bar = byId("progress-bar");
    setHidden(bar, !now.fetching);
    if (now.fetching) {
      const [have, total] = now.fetching;
      setAttribute(bar, "aria-valuemax", String(total));
      setAttribute(bar, "aria-valuenow", String(have));
      bar.firstElementChild.style.transform = `scaleX(${total ? have / total : 0})`;
      setText(byId("progress-text"), `Fetching the model: ${whole(have)} of ${plural(total, "chunk")}, checked one by one.`);
    } else if (node.state === "starting") {
      setText(byId("progress-text"), "Up to date with the swarm. The trainer is starting.");
    } else if (!links.length) {
      setText(byId("progress-text"), "Looking for the swarm: no node has answered yet.");
    } else {
      const missing = now.payloads_missing ? `, ${plural(now.payloads_missing, "payload")} still to come` : "";
      setText(byId("progress-text"), `Catching up with the swarm: ${plural(now.records ?? 0, "record")} known${missing}.`);
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
  const by = (health) => state.members.filter((m) => m.health === health).length;
  const parts = [`${whole(by("alive"))} of ${plural(state.members.length, "member")} alive`];
  for (const health of ["suspect", "down", "left"]) if (by(health)) parts.push(`${by(health)} ${health}`);
  parts.push(`${plural(state.edges.length, "known link")}`);
  return parts.join(", ");
}

/** Replicas are compared pair by pair, each at the newest round that both have sealed. */
function atRounds([oldest, newest]) {
  if (oldest !== newest) return `at rounds ${whole(oldest)} to ${whole(newest)}`;
  return newest ? `at round ${whole(newest)}` : "at the start";
}

function ownTokens(node, now) {
  if (!node.trains) return "this node does not train";
  return known(now.own_tokens) ? `${amount(now.own_tokens)} from this node` : "not known yet";
}

/** How others come to a node that is alone, and the command for it, which there is once it has an address. */
function joiningInWords({ node, swarm }) {
  const address = node.state === "joining" ? null : node.addresses?.[0];
  if (!address) return ["No other node has answered yet.", ""];
  if (swarm.admission === "invited") return ["Nobody else is here yet. An owner invites another machine with", `gossamer invite NODE_ID --join ${address}`];
  return ["Nobody else is here yet. Another machine joins with", `gossamer node --join ${address} --swarm-id ${String(swarm.id).slice(0, 12)}`];
}

function speedInWords(now) {
  if (!known(now.tokens_per_s)) return "not known yet";
  const waiting = now.wait_fraction > 0.005 ? `, waiting ${percent(now.wait_fraction)}` : "";
  return `${amount(now.tokens_per_s)} here${waiting}`;
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
