// Numbers as people read them. A dash stands for a number that there is not.

export const DASH = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 1234567 -> 1,234,567. */
export const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : DASH);

/** At most `digits` significant digits, without an exponent where it reads well. */
export function decimal(value, digits = 3) {
  if (!isNumber(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.max(0, digits - 1));
  return Number(value.toPrecision(size >= 10 ** digits ? Math.ceil(Math.log10(size)) : digits)).toLocaleString("en-US", { maximumFractionDigits: 8 });
}

/** 0.3421 -> 34.2 %. */
export const percent = (share, digits = 1) => (isNumber(share) ? `${(100 * share).toFixed(digits)} %` : DASH);

/** 0.42 s, 12 s, 3 min 5 s, 2 h 10 min. */
export function duration(seconds) {
  if (!isNumber(seconds)) return DASH;
  if (seconds < 0.0995) return `${(1000 * seconds).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** +0.021, -0.3; a dash without a number. */
export const signed = (value, digits = 3) => (isNumber(value) ? `${value < 0 ? "\u2212" : "+"}${Math.abs(value).toFixed(digits)}` : DASH);

/** 1 group, 2 groups. */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Unix seconds -> local date and time. */
export const moment = (seconds) => (isNumber(seconds) ? new Date(1000 * seconds).toLocaleString("sv-SE").slice(0, 16) : DASH);
