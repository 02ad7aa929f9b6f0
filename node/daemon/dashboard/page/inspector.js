// One node in detail: the one pointed at, else the one chosen, else this one.

/** Which member all views speak of. */
class Focus extends EventTarget {
  pointed = null;
  chosen = null;

  point(id) {
    if (id === this.pointed) return;
    this.pointed = id;
    this.dispatchEvent(new Event("member"));
  }

  choose(id) {
    this.chosen = id === this.chosen ? null : id;
    this.pointed = null;
    this.dispatchEvent(new Event("member"));
  }
}

/** One hash says what this node's replica is. */
function digestInWords({ sealed_digest, sealed_round }) {
  if (!known(sealed_digest)) return "no snapshot yet";
  return `${sealed_digest.slice(0, 16)} ${atRounds([sealed_round, sealed_round])}`;
}

class Inspector {
  #list = byId("inspector");

  show(state, focus) {
    const id = focus.pointed ?? focus.chosen;
    const member = state.members.find((m) => m.id === id) ?? itselfOf(state);
    if (!member) return;
    setText(byId("inspector-title"), nameOf(member));
    setText(byId("inspector-kind"), member.self ? "this node" : member.trains ? "trains" : "observes");
    const facts = [...this.#facts(member, state), ...(member.self ? this.#own(state) : this.#link(state, member))];
    const rows = keyed(this.#list, facts.map(([term]) => term), (term) => el("div", {}, el("dt", { textContent: term }), el("dd")));
    facts.forEach(([, value, mark], i) => {
      setText(rows[i].lastChild, value);
      setAttribute(rows[i].lastChild, "class", mark || null);
    });
  }

  #facts(m, state) {
    return [
      ["Health", m.health + (m.self || m.health === "left" || !known(m.heard_s) ? "" : `, heard ${heardText(m.heard_s)}`), `health ${m.health}`],
      ["Round", whole(trained(m, "round"))],
      ["Tokens", amount(trained(m, "tokens"))],
      ["Speed", m.trains ? tokenRate(m.tokens_per_s) : "does not train"],
      ["Loss", lossText(trained(m, "loss"))],
      ["Fresh", known(m.fresh) ? `${percent(m.fresh)} of its last window` : UNKNOWN],
      ["Codec", (m.codec || UNKNOWN) + (m.self && state.codec_why ? `: ${state.codec_why}` : "")],
      ["Replica", m.self ? digestInWords(state) : replicaInWords(m), m.replica === "other" ? "bad" : ""],
      ["Contributions", m.contributions.verdict || contributionsInWords(m.contributions) || "not judged yet", m.contributions.verdict ? "warn" : ""],
      ["Device", m.device || UNKNOWN],
      ["Version", m.release || UNKNOWN],
      ["Address", m.addresses?.length ? m.addresses.join(", ") : "none: it only dials out"],
      ["Id", m.id, "mono"],
    ];
  }

  #own({ reachable, trainer, records, closed_round }) {
    const reach = reachable ? "yes, others have dialled it" : "nobody has dialled it yet";
    return [
      ["Reachable", reach],
      ["Inner steps", whole(trainer.inner_steps)],
      ["Records", whole(records) + (closed_round ? `, closed up to round ${whole(closed_round)}` : "")],
    ];
  }

  #link({ links }, member) {
    const link = links.find((l) => l.id === member.id);
    if (!link) return [["Link", "none: known only through others"]];
    return [
      ["Link", link.outbound ? "dialled by us" : "dialled by them"],
      ["In", `${byteRate(link.received_per_s)}, ${bytes(received(link))} in all`],
      ["Out", `${byteRate(link.sent_per_s)}, ${bytes(sent(link))} in all`],
    ];
  }
}
