// Text of a model as people can see it: what controls a terminal, a line's direction or nothing at all gets a visible sign.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

const NAMES = { 0: "NUL", 7: "BEL", 8: "BS", 13: "CR", 27: "ESC", 127: "DEL" };

function sign(char) {
  const code = char.codePointAt(0);
  if (NAMES[code]) return `\u27e8${NAMES[code]}\u27e9`;
  return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
}

/** "a\u001b[31m\u202eb" -> "a\u27e8ESC\u27e9[31m\u27e8U+202E\u27e9b". Newlines and tabs stay. */
export const visible = (text) => text.replace(HIDDEN, sign);

/** The same for a single token: newlines, tabs and lone spaces get a sign as well. */
export function visibleToken(piece) {
  if (piece === "") return "\u2219";
  return visible(piece).replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u21e5\t");
}
