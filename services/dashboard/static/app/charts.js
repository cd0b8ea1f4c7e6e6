// A chart is a card: heading, one sentence that says what it shows now, the drawing, and the same numbers as a table.

import "echarts";
import { el, freshId, table } from "bapo/app/dom.js";
import { decimal } from "bapo/app/format.js";

const echarts = globalThis.echarts;
const MOST_DOTS = 200;
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
 *   note     what is drawn, and what of the paper it is
 *   draw(data) -> null when there is nothing to draw yet, or {
 *     summary  one sentence with the numbers of now
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
  const element = el(
    "section",
    { class: `card${wide ? " wide" : ""}`, id, "aria-labelledby": titleId },
    el(`h${level}`, { id: titleId }, title),
    note ? el("p", { class: "note" }, note) : null,
    summary, nothing, canvas, body, details,
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
    details.hidden = !drawn?.table;
    summary.textContent = drawn?.summary ?? "";
    if (drawn?.body) body.replaceChildren(drawn.body);
    else body.replaceChildren();
    isDue = Boolean(drawn?.option);
    if (isSeen) drawIfDue();
    if (details.open) fill();
  }

  /** A drawing that nobody sees is made when somebody does: a long page then costs what its visible part costs. */
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
    axisLabel: { color: text, hideOverlap: true },
    splitLine: { lineStyle: { color: line, opacity: 0.6 } },
    nameTextStyle: { color: text },
  };
  const merged = (given, own) => (given ? [given].flat().map((one) => ({ ...axis, ...own, ...one, axisLabel: { ...axis.axisLabel, ...one.axisLabel } })) : undefined);
  return {
    animation: false,
    textStyle: { fontFamily: "inherit", color: text },
    grid: { left: 8, right: 16, top: 40, bottom: 8, containLabel: true, ...grid },
    legend: { top: 0, left: 0, itemWidth: 14, itemHeight: 8, icon: "roundRect", textStyle: { color: text }, inactiveColor: line, type: "scroll", ...legend },
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
    xAxis: merged(xAxis, { splitLine: { show: false } }),
    yAxis: merged(yAxis, {}),
  };
}

/** A line over steps. */
export const line = (name, steps, values, name_of_colour, more = {}) => ({
  type: "line",
  name,
  data: steps.map((step, index) => [step, values[index]]),
  showSymbol: steps.length < 2,
  symbolSize: 5,
  connectNulls: false,
  sampling: "lttb",
  lineStyle: { width: 1.8, color: colour(name_of_colour) },
  itemStyle: { color: colour(name_of_colour) },
  ...more,
  // A thousand dots are slow and say nothing; without them a value between two gaps needs its neighbours to be seen.
  ...(more.showSymbol && steps.length > MOST_DOTS ? { showSymbol: false, connectNulls: true } : {}),
});

/** The axis of learner steps. */
export const stepAxis = (steps) => ({ type: "value", name: "", min: steps[0], max: Math.max(steps[0] + 1, steps[steps.length - 1]), minInterval: 1 });

/** A vertical mark at the chosen step, for a series' `markLine`. */
export const atStep = (step) =>
  step === null
    ? undefined
    : { silent: true, symbol: "none", animation: false, label: { show: false }, lineStyle: { color: colour("text"), type: "solid", width: 1, opacity: 0.7 }, data: [{ xAxis: step }] };
