// One prompt: its text, pass rate by policy version, every visit, and when it entered and left each buffer and why.

import { chartCard, colour } from "bapo/app/charts.js";
import { el, table } from "bapo/app/dom.js";
import { DASH, decimal, plural } from "bapo/app/format.js";
import { NotExported, TokenNeeded, follow } from "bapo/app/data.js";
import { pictures } from "bapo/app/images.js";
import { visible } from "bapo/app/visible.js";

const KINDS = { fresh: ["Fresh", "x1", "circle"], reevaluated: ["Re-evaluated", "x2", "diamond"], reused: ["Reused", "x3", "emptyRect"] };
const TABLES = { bad: "B_bad", high: "B_high" };

function mount(root, shell, here) {
  const id = here.path[0] ?? "";
  const notices = el("div", {});
  const grid = el("div", { class: "grid" });
  const text = el("pre", { class: "plain", tabindex: "0" });
  const card = el("section", { class: "card wide", "aria-labelledby": "prompt-text", hidden: true }, el("h2", { id: "prompt-text" }, "Prompt"), text);
  grid.append(card);
  root.append(el("h1", {}, "Prompt ", el("code", {}, visible(id))), notices, grid);
  let shown = null;
  shell.setTitle(document.title.replace(/ - BAPO$/, ""));

  const rates = chartCard(grid, {
    title: "Pass rate by policy version", id: "pass-rate", wide: true,
    note: "Mean reward of each group, at the policy version that sampled it. A reused group is drawn around its original group.",
    draw: ({ visits, c1 }) => visits.length ? {
      summary: summaryOf(visits),
      option: {
        tooltip: { trigger: "item" },
        xAxis: { type: "value", name: "policy version", minInterval: 1, min: (range) => range.min - 1, max: (range) => range.max + 1 },
        yAxis: { type: "value", min: -0.05, max: 1.05, name: "pass rate", axisLabel: { formatter: (value) => (value < 0 || value > 1 ? "" : decimal(value)) } },
        legend: { show: true },
        series: Object.entries(KINDS).map(([kind, [name, paint, symbol]], index) => ({
          type: "scatter", name, symbol, symbolSize: kind === "reused" ? 18 : 10, z: kind === "reused" ? 2 : 3, itemStyle: { color: colour(paint) },
          data: visits.filter((visit) => visit.kind === kind).map((visit) => [visit.version, visit.mu]),
          markLine: index || c1 === null ? undefined : { silent: true, symbol: "none", lineStyle: { type: "dashed", color: colour("text-soft") }, label: { formatter: "c1", position: "insideEndTop", color: colour("text-soft") }, data: [{ yAxis: c1 }] },
        })),
      },
      table: () => ({ header: ["version", "pass rate", "kind", "step"], rows: visits.map((v) => [String(v.version), decimal(v.mu), KINDS[v.kind][0], String(v.step)]) }),
    } : null,
  });
  const visits = chartCard(grid, {
    title: "Every visit", id: "visits", wide: true, note: "Groups of this prompt that batch assembly read, and the rule that applied.",
    draw: (answer) => answer.visits.length ? { body: visitTable(answer) } : null,
  });
  const tables = chartCard(grid, {
    title: "Buffer changes", id: "transitions", wide: true, note: "When the prompt entered and left B_bad and B_high, from a replay of the records (docs/monitoring.md).",
    empty: "This prompt never entered B_bad or B_high.",
    draw: (answer) => answer.transitions.length ? { body: scrolled("Changes of the buffers", table({
      header: ["Step", "Buffer", "Change", "Reason"], numeric: [],
      rows: answer.transitions.map((event) => [String(event.step), TABLES[event.table], event.change, event.why]),
    })) } : null,
  });

  const visitTable = (answer) => scrolled("Visits", table({
    header: ["Step", "Kind", "Version", "Reward sum", "Group", "Batch", "Reason"], numeric: [2, 3],
    rows: answer.visits.map((visit) => [
      String(visit.step),
      KINDS[visit.kind][0] + (visit.kind === "reused" ? ` (of step ${visit.birth})` : visit.asked !== visit.step ? ` (requested in step ${visit.asked})` : ""),
      String(visit.version),
      `${decimal(visit.k)} of ${visit.size}`,
      el("a", { href: shell.linkTo("group", [visit.group], { step: visit.step }) }, visible(visit.group), visit.has_text ? " (text)" : ""),
      visit.origin ? visit.origin.toUpperCase() : DASH,
      visit.why,
    ]),
  }));

  /** Texts need the operator's token where tokens are on: without it the card stays away. */
  async function showText(source, visit) {
    if (!visit) return;
    try {
      const { prompt, images } = await source.get("group", { id: visit.group, step: visit.step });
      text.textContent = visible(prompt ?? "");
      const shown = pictures(images);
      if (shown) card.append(shown);
      card.hidden = prompt === null;
    } catch (error) {
      if (!(error instanceof TokenNeeded || error instanceof NotExported)) throw error;
    }
  }

  const following = follow(async (source) => {
    let answer;
    try {
      answer = await source.get("prompt", { id });
    } catch (error) {
      if (!(error instanceof NotExported)) throw error;
      notices.replaceChildren(el("p", { class: "notice" }, "This prompt is not included in the exported file, which contains the 300 most recently read. Open the run with ", el("code", {}, "bapo view RUN"), "."));
      return false;
    }
    const key = JSON.stringify([answer.generation, answer.visits.length, answer.transitions.length, answer.differs]);
    if (key !== shown) {
      shown = key;
      notices.replaceChildren(answer.differs ? el("p", { class: "notice" }, `Buffer changes are unknown from here on, because the replay of the records differs from the run: ${answer.differs}.`) : "");
      for (const one of [rates, visits, tables]) one.show(answer);
      if (card.hidden) await showText(source, answer.visits.findLast((visit) => visit.has_text));
    }
    return !answer.is_complete;
  }, shell.setState);

  return {
    unmount: following.stop,
    update(next) {
      if (next.path[0] === id) return;
      following.stop();
      root.replaceChildren();
      Object.assign(this, mount(root, shell, next));
    },
  };
}

const scrolled = (label, child) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, child);

function summaryOf(visits) {
  const measured = visits.filter((visit) => visit.kind !== "reused");
  const [first, last] = [measured[0] ?? visits[0], measured[measured.length - 1] ?? visits[0]];
  const trained = visits.filter((visit) => visit.origin).length;
  return `${plural(visits.length, "visit")}, trained in ${trained}; mean reward ${decimal(first.mu)} at version ${first.version}, ${decimal(last.mu)} at version ${last.version}.`;
}

export default { name: "prompt", title: "Prompt", mount };
