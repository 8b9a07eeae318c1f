// Numbers and times for people.

const COUNT = new Intl.NumberFormat("en-US");
const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export const count = (number) => COUNT.format(number);
export const short = (number) => SHORT.format(number);
// In full as long as it is read at a glance.
export const large = (number) => (number < 1e7 ? count(number) : short(number));
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

// A share that isn't whole never reads 100 %, nor 0 % where there is something.
export function percent(share) {
  if (share === null || share === undefined) return "–";
  let value = Math.round(share * 1000) / 10;
  if (value === 100 && share < 1) value = 99.9;
  if (value === 0 && share > 0) value = 0.1;
  return `${value.toFixed(1)}\u202f%`;
}

export function ago(seconds) {
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

export function span(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

// A short time.
export function seconds(time) {
  if (time > 0 && time < 0.001) return `${Math.max(1, Math.round(time * 1e6))}\u202fµs`;
  if (time < 1) return `${Math.round(time * 1000)}\u202fms`;
  return `${time < 10 ? time.toFixed(1) : Math.round(time)}\u202fs`;
}

// A round number, such that about `parts` of it make up `most`.
export function roundStep(most, parts) {
  const rough = Math.max(most / parts, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

export const words = (name) => name.replaceAll("_", " ");
