// The images of a prompt. Fetched like other answers, because an <img> cannot send a token.

import { el } from "bapo/app/dom.js";
import { source } from "bapo/app/data.js";

/** One element with all images; null without any. */
export function pictures(digests) {
  if (!digests || !digests.length) return null;
  return el("div", { class: "pictures" }, digests.map((id, index) => {
    const picture = el("img", { alt: `Image ${index + 1} of the prompt` });
    source.get("image", { id }).then(({ url }) => { picture.src = url; }, (error) => {
      picture.replaceWith(el("p", { class: "soft" }, `Image ${index + 1} cannot be shown: ${error.message}.`));
    });
    return picture;
  }));
}
