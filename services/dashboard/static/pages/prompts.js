// All prompts, those of one cell of the migration matrix, and the search over ids and texts.

import { el, table } from "bapo/app/dom.js";
import { DASH, count, plural } from "bapo/app/format.js";
import { NotExported, follow } from "bapo/app/data.js";
import { visible } from "bapo/app/visible.js";

const PAGE = 100;
const WAIT_MS = 200;

function mount(root, shell, here) {
  let params = here.params;
  let timer = null;
  let shown = null;
  shell.setTitle(document.title.replace(/ - BAPO$/, ""));
  const results = el("div", { class: "stack", id: "results" });
  const words = el("input", { type: "search", id: "words", maxlength: "200", autocomplete: "off", spellcheck: "false", value: params.get("text") ?? "", oninput: later });
  const where = el("select", { id: "table", onchange: () => go({ table: where.value, offset: null }) },
    [["", "all"], ["bad", "in B_bad now"], ["high", "in B_high now"]].map(([value, text]) => el("option", { value }, text)));
  where.value = params.get("table") ?? "";
  root.append(
    el("h1", {}, "Prompts"),
    el("form", { class: "controls", role: "search", onsubmit: (event) => { event.preventDefault(); clearTimeout(timer); go({ text: words.value.trim(), offset: null }); } },
      el("label", { for: "words" }, "Search ids, prompts and responses"), words, el("button", { type: "submit" }, "Search"),
      el("label", { for: "table" }, "Prompts"), where),
    results);

  function later() {
    clearTimeout(timer);
    timer = setTimeout(() => go({ text: words.value.trim(), offset: null }), WAIT_MS);
  }
  function go(changes) {
    shell.setParams(changes);
    params = new URLSearchParams(location.hash.split("?")[1] ?? "");
    following.now();
  }

  const following = follow(async (source) => {
    const asked = params;
    const text = params.get("text");
    const isMore = await (text ? search(source, text) : list(source));
    return isMore || params !== asked; // another question came meanwhile
  }, shell.setState);

  async function search(source, text) {
    let answer;
    try {
      answer = source.isExported ? await searchExported(source, text) : await source.get("search", { text });
    } catch (error) {
      if (!(error instanceof NotExported)) throw error;
      results.replaceChildren(el("p", { class: "notice" }, error.message));
      return false;
    }
    if ((params.get("text") ?? "") !== text) return true;
    if (!changed(["search", text, answer.hits, answer.has_all, answer.taken, answer.recorded, answer.num_cut])) return !answer.is_whole || !answer.is_complete;
    shell.announce(`${answer.hits.length} found`);
    const notes = [
      answer.is_exported ? `In an exported file only ids of prompts are searched: of ${count(answer.included)} of ${plural(answer.total, "prompt")}, the last seen.` : `Texts of ${count(answer.taken)} of ${plural(answer.recorded, "recorded step")} are searched.`,
      answer.has_all ? null : "There are more matches; refine the search.",
      !answer.is_exported && !answer.recorded ? "This run has no token records, so only ids are searched: set diagnostics.token_records to record them." : null,
      answer.num_cut ? `Of ${plural(answer.num_cut, "longer text")} only the first and the last ${count(answer.end_chars)} characters are searched.` : null,
      answer.is_full ? "The index is full: texts of later steps are not included." : null,
    ];
    results.replaceChildren(
      el("p", { role: "status" }, `${answer.hits.length}${answer.has_all ? "" : " newest"} found. `, notes.filter(Boolean).join(" ")),
      answer.hits.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Found" }, table({
        header: ["Found", "Kind", "Step", "Text"], numeric: [2],
        rows: answer.hits.map((hit) => [hitLink(hit), hit.kind, String(hit.step), el("code", {}, visible(hit.snippet))]),
      })) : "");
    return !answer.is_whole || !answer.is_complete;
  }

  function hitLink(hit) {
    if (hit.kind === "prompt") return el("a", { href: shell.linkTo("prompt", [hit.id]) }, visible(hit.id));
    const more = hit.kind === "response" ? { step: hit.step, response: hit.row } : {};
    return el("a", { href: shell.linkTo("group", [hit.id], more) }, visible(hit.id), hit.kind === "response" ? ` / ${hit.row}` : "");
  }

  async function list(source) {
    const query = { first: params.get("first"), last: params.get("last"), until: params.get("until"), table: params.get("table"), offset: params.get("offset") };
    let answer;
    try {
      answer = await source.get("prompts", query);
    } catch (error) {
      if (!(error instanceof NotExported)) throw error;
      results.replaceChildren(el("p", { class: "notice" }, error.message));
      return false;
    }
    if (!changed(["list", query, answer.total, answer.prompts, answer.differs])) return !answer.is_complete;
    const size = answer.group_size;
    const cell = query.first !== null || query.last !== null;
    const k = (value) => (value === null ? DASH : `${value} of ${size}`);
    results.replaceChildren(
      el("p", { role: "status" }, plural(answer.total, "prompt"), cell ? ` that had ${query.first ?? "any number"} of ${size} correct at the first fresh visit and ${query.last ?? "any number"} at the last${query.until ? ` up to step ${query.until}` : ""}. ` : ". ",
        cell ? el("a", { href: shell.linkTo("prompts") }, "All prompts") : ""),
      query.table && answer.differs ? el("p", { class: "notice" }, `The content of the buffers is unknown: ${answer.differs}.`) : "",
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Prompts" }, table({
        header: ["Prompt", "First", "Last", "Visits", "Trained", "First step", "Last step"],
        rows: answer.prompts.map((p) => [el("a", { href: shell.linkTo("prompt", [p.id]) }, el("code", {}, visible(p.id))), k(p.first), k(p.last), ...[p.visits, p.trained, p.first_step, p.last_step].map(count)]),
      })),
      pager(answer));
    return !answer.is_complete;
  }

  function pager({ offset, total }) {
    if (total <= PAGE) return "";
    const at = (to, words) => el("button", { type: "button", class: "quiet", disabled: to < 0 || to >= total, onclick: () => go({ offset: to || null }) }, words);
    return el("p", { class: "pager" }, at(offset - PAGE, "Newer"), ` ${offset + 1} to ${Math.min(total, offset + PAGE)} `, at(offset + PAGE, "Older"));
  }

  function changed(key) {
    const text = JSON.stringify(key);
    if (text === shown) return false;
    shown = text;
    return true;
  }

  return {
    unmount() {
      clearTimeout(timer);
      following.stop();
    },
    update(next) {
      params = next.params;
      words.value = params.get("text") ?? "";
      where.value = params.get("table") ?? "";
      shown = null;
      following.now();
    },
  };
}

/** Search in the ids of all prompts of the file, which has a few pages of them. */
async function searchExported(source, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const included = [];
  let total = 0;
  try {
    do {
      const page = await source.get("prompts", { offset: included.length || null });
      included.push(...page.prompts);
      total = page.total;
    } while (included.length < total);
  } catch (error) {
    if (!(error instanceof NotExported) || !included.length) throw error;
  }
  const found = included.filter((p) => words.every((word) => p.id.toLowerCase().includes(word)));
  const hits = found.map((p) => ({ kind: "prompt", id: p.id, step: p.last_step, row: 0, snippet: p.id }));
  return { hits, has_all: true, is_whole: true, is_complete: true, is_exported: true, included: included.length, total, taken: 0, recorded: 0, is_full: false, num_cut: 0 };
}

export default { name: "prompts", title: "Prompts", order: 2, mount };
