// A chart is a card: heading, one sentence that says what it shows now, the drawing, and the same numbers as a table.

import "echarts";
import { el, freshId, table } from "bapo/app/dom.js";
import { decimal } from "bapo/app/format.js";

const echarts = globalThis.echarts;
const MAX_DOTS = 200;
const MARKED = 40;
const cards = new Set();

const probe = el("span", { hidden: true });
document.body.append(probe);
const colours = new Map();

/** A colour of the style sheet in the theme of now: colour("x1") -> "rgb(42, 111, 219)". */
export function colour(name) {
  if (!colours.has(name)) {
    probe.style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}

/**
 * A card in `parent`.
 *
 *   title    heading (level 2 unless `level` says otherwise)
 *   note     what is drawn, and what of the paper it is; behind an icon
 *   draw(data) -> null when there is nothing to draw yet, or {
 *     summary  one sentence with the numbers of now
 *     isWarning  whether it is one
 *     option   of ECharts, without what `base` below has for all; or
 *     body     an element, instead of a drawing
 *     table    {caption, header, rows} of the same numbers; made when it is opened
 *   }
 *   empty    what is said until there is something
 *
 * Returns {show(data), element, chart()}. Redrawn by itself when its size or the theme changes.
 */
export function chartCard(parent, { title, note, draw, empty = "Nothing to show yet.", height = 260, level = 2, id = freshId("chart"), wide = false }) {
  const titleId = `${id}-title`;
  const summary = el("p", { class: "summary", id: `${id}-summary` });
  const canvas = el("div", { class: "canvas", role: "img", "aria-labelledby": titleId, "aria-describedby": `${id}-summary`, hidden: true });
  const body = el("div", { class: "body" });
  const nothing = el("p", { class: "empty" }, "Loading ...");
  const rows = el("div", { class: "rows", tabindex: "0", role: "region", "aria-label": `${title}: numbers` });
  const details = el("details", { hidden: true, ontoggle: () => details.open && fill() }, el("summary", {}, "Numbers"), rows);
  const csv = el("button", { type: "button", class: "link", hidden: true, "aria-label": `${title} as CSV`, onclick: () => save(`${id}.csv`, csvOf(drawn.table())) }, "CSV");
  const png = el("button", { type: "button", class: "link", hidden: true, "aria-label": `${title} as PNG`, onclick: () => save(`${id}.png`, card.picture()) }, "PNG");
  const element = el(
    "section",
    { class: `card${wide ? " wide" : ""}`, id, "aria-labelledby": titleId },
    el("header", {}, el(`h${level}`, { id: titleId }, title), note ? info(title, note) : null),
    summary, nothing, canvas, body, el("div", { class: "tools" }, details, csv, png),
  );
  canvas.style.height = `${height}px`;
  parent.append(element);

  let chart = null;
  let data;
  let drawn = null;
  let isDue = false;
  let isSeen = false;

  function fill() {
    rows.replaceChildren(drawn?.table ? table(drawn.table()) : "");
  }

  function redraw() {
    drawn = data === undefined ? null : draw(data);
    nothing.hidden = drawn !== null;
    if (data !== undefined) nothing.textContent = empty;
    canvas.hidden = !drawn?.option;
    details.hidden = csv.hidden = !drawn?.table;
    png.hidden = !drawn?.option;
    summary.textContent = drawn?.summary ?? "";
    summary.classList.toggle("warn", Boolean(drawn?.isWarning));
    if (drawn?.body) body.replaceChildren(drawn.body);
    else body.replaceChildren();
    isDue = Boolean(drawn?.option);
    if (isSeen) drawIfDue();
    if (details.open) fill();
  }

  /** A drawing is made when it scrolls into view: a long page costs what its visible part costs. */
  function drawIfDue() {
    if (!isDue) return;
    isDue = false;
    chart ??= echarts.init(canvas, null, { renderer: "canvas" });
    chart.setOption(withBase(drawn.option), { notMerge: true, lazyUpdate: true });
  }

  const card = {
    element,
    show(next) {
      data = next;
      redraw();
    },
    redraw,
    chart() {
      drawIfDue();
      return chart;
    },
    see(isNowSeen) {
      isSeen = isNowSeen;
      if (isSeen) drawIfDue();
    },
    picture: () => card.chart().getDataURL({ type: "png", pixelRatio: 2, backgroundColor: colour("raised") }),
    resize: () => chart?.resize(),
    isGone: () => !element.isConnected,
    close() {
      sizes.unobserve(canvas);
      views.unobserve(canvas);
      chart?.dispose();
      chart = null;
    },
  };
  sizes.observe(canvas);
  canvas.card = card;
  views.observe(canvas);
  cards.add(card);
  return card;
}

/** The card, hidden until its data fulfil a condition: isShown(data). */
export function shownIf(isShown, card) {
  card.element.hidden = true;
  return {
    ...card,
    show(data) {
      card.element.hidden = !isShown(data);
      card.show(data);
    },
  };
}

/** An explanation behind an icon: a button for the keyboard and for screen readers. */
const info = (title, note) => el("details", { class: "info" }, el("summary", { "aria-label": `About ${title}`, title: note }, "i"), el("p", { class: "note" }, note));

/** A click outside an open explanation, or Escape, closes it. */
addEventListener("click", (event) => document.querySelectorAll("details.info[open]").forEach((one) => one.contains(event.target) || one.removeAttribute("open")));
addEventListener("keydown", (event) => event.key === "Escape" && document.querySelectorAll("details.info[open]").forEach((one) => one.removeAttribute("open")));

const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
const csvOf = ({ header, rows }) => `data:text/csv;charset=utf-8,${encodeURIComponent([header, ...rows].map((row) => row.map((cell) => quoted(cell.textContent ?? String(cell))).join(",")).join("\n"))}`;

function save(name, url) {
  el("a", { href: url, download: name }).click();
}

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) if (!target.hidden) target.card?.resize();
});
const views = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.card?.see(isIntersecting);
}, { rootMargin: "300px" });
addEventListener("beforeprint", () => cards.forEach((card) => card.chart()));

/** After a change of theme; cards of pages that are gone are forgotten. */
export function redrawAll() {
  colours.clear();
  for (const card of [...cards]) {
    if (card.isGone()) {
      card.close();
      cards.delete(card);
    } else card.redraw();
  }
}

/** What all drawings share: colours of the theme, no animation, tooltips drawn and not made of markup. */
function withBase({ tooltip, legend, grid, xAxis, yAxis, ...option }) {
  const text = colour("text-soft");
  const line = colour("line");
  const axis = {
    axisLine: { lineStyle: { color: line } },
    axisTick: { show: false },
    axisLabel: { color: text, hideOverlap: true, fontSize: 13 },
    nameLocation: "middle",
    splitLine: { lineStyle: { color: line, opacity: 0.6 } },
    nameTextStyle: { color: text, fontSize: 13 },
  };
  const merged = (given, own) => (given ? [given].flat().map((one) => ({ ...axis, ...own, ...(one.name ? {} : { nameGap: 0 }), ...one, axisLabel: { ...axis.axisLabel, ...one.axisLabel } })) : undefined);
  return {
    animation: false,
    textStyle: { fontFamily: "inherit", color: text },
    grid: { left: [yAxis].flat()[0]?.name ? 30 : 8, right: 16, top: 40, bottom: [xAxis].flat()[0]?.name ? 26 : 8, containLabel: true, ...grid },
    legend: { top: 0, left: 0, itemWidth: 14, itemHeight: 8, icon: "roundRect", textStyle: { color: text, fontSize: 13 }, inactiveColor: line, type: "scroll", ...legend },
    tooltip: {
      trigger: "axis",
      renderMode: "richText",
      confine: true,
      backgroundColor: colour("raised"),
      borderColor: line,
      textStyle: { color: colour("text"), fontSize: 12 },
      valueFormatter: (value) => decimal(Array.isArray(value) ? value[value.length - 1] : value, 4),
      axisPointer: { lineStyle: { color: text } },
      ...tooltip,
    },
    ...option,
    xAxis: merged(xAxis, { splitLine: { show: false }, nameGap: 26 }),
    yAxis: merged(yAxis, { nameGap: 46 }),
  };
}

/** A line over steps. */
export const line = (name, steps, values, name_of_colour, more = {}) => ({
  type: "line",
  name,
  data: steps.map((step, index) => [step, values[index]]),
  showSymbol: steps.length <= MARKED,
  symbol: "circle",
  symbolSize: 4,
  connectNulls: false,
  sampling: "lttb",
  lineStyle: { width: 1.8, color: colour(name_of_colour) },
  itemStyle: { color: colour(name_of_colour) },
  ...more,
  // A thousand dots are slow and say nothing; without them a value between two gaps needs its neighbours to be seen.
  ...(more.showSymbol && steps.length > MAX_DOTS ? { showSymbol: false, connectNulls: true } : {}),
});

/** The axis of learner steps. */
export const stepAxis = (steps) => ({ type: "value", name: "step", min: steps[0], max: Math.max(steps[0] + 1, steps[steps.length - 1]), minInterval: 1 });

/** A vertical mark at the chosen step, for a series' `markLine`. */
export const atStep = (step) =>
  step === null
    ? undefined
    : { silent: true, symbol: "none", animation: false, label: { show: false }, lineStyle: { color: colour("text"), type: "solid", width: 1, opacity: 0.7 }, data: [{ xAxis: step }] };
