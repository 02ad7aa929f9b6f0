// Building and changing the page. Text from the network goes in as text nodes only.

const byId = (id) => document.getElementById(id);

/** An element with properties and children (strings become text). */
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Writes only what differs, so that an unchanged page causes no layout. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/** Makes `parent`'s children those of `keys`, in that order; each is made once, by `make(key)`. */
function keyed(parent, keys, make) {
  const there = (parent.keyedChildren ??= new Map());
  const wanted = new Set(keys);
  for (const [key, node] of there) {
    if (!wanted.has(key)) {
      node.remove();
      there.delete(key);
    }
  }
  let next = parent.firstElementChild;
  return keys.map((key) => {
    let node = there.get(key);
    if (!node) there.set(key, (node = make(key)));
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
    return node;
  });
}

/** A row of buttons of which one is pressed. `choose` is called with its value. */
function choice(parent, options, chosen, choose) {
  const buttons = options.map(([value, label, title]) => {
    const button = el("button", { type: "button", textContent: label, title: title ?? "" });
    button.addEventListener("click", () => {
      press(value);
      choose(value);
    });
    return [value, button];
  });
  function press(value) {
    for (const [own, button] of buttons) setAttribute(button, "aria-pressed", String(own === value));
  }
  press(chosen);
  parent.append(...buttons.map(([, button]) => button));
  return press;
}

/** What was chosen last time of some values, else the first. */
function remembered(name, values) {
  try {
    const kept = localStorage.getItem(`gossamer-${name}`);
    return values.includes(kept) ? kept : values[0];
  } catch {
    return values[0];
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(`gossamer-${name}`, value);
  } catch {
    // The browser does not allow it: then it holds until the page is closed.
  }
}

/** A legend's entries: [shape class, words]. */
function legend(parent, entries, tag = "span") {
  parent.append(...entries.map(([shape, words]) => el(tag, {}, el("i", { className: `key ${shape}`, ariaHidden: "true" }), words)));
}
