// The resolved configuration of the run, and the last lines of each part's log.

import { el, freshId } from "bapo/app/dom.js";
import { source, TokenNeeded } from "bapo/app/data.js";
import { visible } from "bapo/app/visible.js";

function mount(root, shell, here) {
  const id = freshId("part");
  const select = el("select", { id, onchange: () => { shell.setParams({ part: select.value }); load(select.value); } });
  const log = el("pre", { class: "plain log", tabindex: "0", "aria-label": "Log" });
  const configuration = el("pre", { class: "plain log", tabindex: "0", "aria-label": "Configuration" });
  const logs = el("section", { class: "card" }, el("h2", {}, "Log"), el("p", { class: "chooser" }, el("label", { for: id }, "Part "), select), log);
  root.append(el("h1", {}, "Configuration and logs"), el("div", { class: "stack" }, logs, el("section", { class: "card" }, el("h2", {}, "Configuration"), configuration)));

  async function load(part) {
    try {
      const answer = await source.get("files", { part });
      if (select.options.length !== answer.parts.length) select.replaceChildren(...answer.parts.map((name) => el("option", { value: name }, name)));
      logs.hidden = !answer.parts.length || source.isExported;
      configuration.textContent = visible(answer.configuration);
      if (!part && answer.parts.length && !source.isExported) return load(answer.parts.includes("learner") ? "learner" : answer.parts[0]);
      select.value = part;
      log.textContent = visible(answer.tail);
      log.scrollTop = log.scrollHeight;
      shell.setState(source.isExported ? "exported" : "live", null);
    } catch (error) {
      shell.setState(error instanceof TokenNeeded ? "token" : "refused", error);
    }
  }
  load(here.params.get("part") ?? "");
  return { unmount: () => {} };
}

export default { name: "files", title: "Configuration and logs", order: 3, mount };
