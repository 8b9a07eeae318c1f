// Elements without markup strings: the page's policy forbids those.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "style") {
      for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    } else if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, properties, ...children) =>
  fill(document.createElement(tag), properties, children);

export const svg = (tag, properties, ...children) =>
  fill(document.createElementNS(SVG, tag), properties, children);

export const byId = (id) => document.getElementById(id);

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Put `wanted` into `parent`, moving no element that stands where it should: a moved one loses
// the focus.
export function arrange(parent, wanted) {
  const focused = document.activeElement;
  const keep = new Set(wanted);
  for (const child of [...parent.children]) if (!keep.has(child)) child.remove();
  wanted.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  if (keep.has(focused) && document.activeElement !== focused) {
    focused.focus({ preventScroll: true });
  }
}

// Arrow keys, Home and End in a list of options, of which one takes part in the tab order.
export function moveByKeys(event, options, current, axis) {
  const [back, on] = axis === "x" ? ["ArrowLeft", "ArrowRight"] : ["ArrowUp", "ArrowDown"];
  const at = options.indexOf(current);
  const next = { [back]: at - 1, [on]: at + 1, Home: 0, End: options.length - 1,
    PageUp: Math.max(0, at - 10), PageDown: Math.min(options.length - 1, at + 10) }[event.key];
  if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return null;
  event.preventDefault();
  return options[Math.min(Math.max(next, 0), options.length - 1)] ?? null;
}
