// The style sheet and the script of report.html. Colours of the series keep apart for colour-blind readers
// (after Okabe and Ito, darkened or lightened for contrast) and every series has its own dash pattern as
// well.
#pragma once

namespace convergence {

inline constexpr char kReportStyle[] = R"css(
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --panel: #ffffff; --border: #e1e4e9; --text: #1b1f24; --muted: #5c6570; --grid: #e9ebef;
  --series-0: #0072b2; --series-1: #d55e00; --series-2: #007f5f; --series-3: #a8397f; --series-4: #8a6d00;
  --series-5: #505a66;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101317; --panel: #181c22; --border: #2b313a; --text: #e8eaed; --muted: #9da5b0; --grid: #272d35;
    --series-0: #56b4e9; --series-1: #ff9249; --series-2: #35c79c; --series-3: #e892c6; --series-4: #e8c547;
    --series-5: #b4bcc8;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 36px 24px 64px; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 28px; letter-spacing: -0.01em; line-height: 1.2; }
h2 { margin: 36px 0 12px; font-size: 18px; }
.lede { margin: 6px 0 24px; color: var(--muted); font-size: 16px; }
.panel, figure { background: var(--panel); border: 1px solid var(--border); border-radius: 10px; }
.panel { overflow-x: auto; padding: 6px 18px; }
.scrolls::after { content: "scrolls sideways →"; position: sticky; left: 0; color: var(--muted);
  font-size: 13px; }
.panel + .panel, .charts + .panel { margin-top: 18px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 9px 0 9px 22px; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
th { color: var(--muted); font-size: 13px; font-weight: 600; }
th button { padding: 0; border: 0; background: none; color: inherit; font: inherit; cursor: pointer; }
th[aria-sort] button { color: var(--text); }
th button::after { content: " ↕"; opacity: 0.5; }
th[aria-sort=ascending] button::after { content: " ↑"; } th[aria-sort=descending] button::after { content: " ↓"; }
td { border-top: 1px solid var(--border); }
td:first-child { font-weight: 600; }
.note { margin: 10px 2px 0; color: var(--muted); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 18px;
  margin-top: 28px; }
.charts.small { grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); margin-top: 0; }
figure { margin: 0; padding: 16px 18px 8px; position: relative; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 18px; margin-bottom: 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; color: var(--muted); font-size: 13px; }
.key { display: inline-flex; align-items: center; gap: 7px; white-space: nowrap; }
.sample { width: 34px; height: 10px; }
.shade { width: 20px; height: 12px; border-radius: 3px; background: var(--muted); opacity: 0.3; }
.stack { display: flex; flex-direction: column; gap: 18px; } .stack figure { flex: 1 0 auto; }
.swatch { display: inline-block; width: 10px; height: 10px; margin-right: 9px; border-radius: 3px; }
.chart { display: block; width: 100%; height: auto; overflow: visible; touch-action: pan-y; }
.chart text { fill: var(--muted); font-size: 12.5px; font-variant-numeric: tabular-nums; }
.charts.small .chart text { font-size: 17px; }
@media (max-width: 560px) { .chart text, .charts.small .chart text { font-size: 21px; }
  body { padding: 24px 14px 48px; } dl { grid-template-columns: 1fr; gap: 2px; } dd { margin-bottom: 8px; } }
.grid { stroke: var(--grid); } .axis, .zero { stroke: var(--muted); stroke-opacity: 0.6; }
polyline { fill: none; stroke: currentColor; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.faint polyline { stroke-width: 1; stroke-opacity: 0.35; }
circle { fill: currentColor; } .band { fill: currentColor; fill-opacity: 0.14; } .bar { fill: currentColor; rx: 3px; }
.line.series-0 polyline { stroke-width: 5; stroke-opacity: 0.5; }
.line.series-1 polyline { stroke-dasharray: 6 5; } .line.series-2 polyline { stroke-dasharray: 1 5; }
.line.series-3 polyline { stroke-dasharray: 12 4 2 4; } .line.series-4 polyline { stroke-dasharray: 14 5; }
.line.series-5 polyline { stroke-dasharray: 3 3; }
.series-0 { color: var(--series-0); } .series-1 { color: var(--series-1); } .series-2 { color: var(--series-2); }
.series-3 { color: var(--series-3); } .series-4 { color: var(--series-4); } .series-5 { color: var(--series-5); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 6px 22px; margin: 12px 0; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; } dd code { white-space: pre-wrap; }
summary { cursor: pointer; color: var(--muted); padding: 6px 0; }
pre { margin: 0 0 10px; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-x: auto; }
.guide { stroke: var(--muted); stroke-dasharray: 3 3; pointer-events: none; }
.tip { position: absolute; z-index: 1; padding: 6px 10px; border: 1px solid var(--border); border-radius: 7px;
  background: var(--panel); box-shadow: 0 3px 14px rgb(0 0 0 / 0.18); font-size: 13px; pointer-events: none;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
.tip b { color: var(--muted); font-weight: 500; }
)css";

// Sorts a table by the column whose title is clicked, by amounts ("1 min 05 s", "12.3MB") where cells have
// some. Says under a table that is wider than the page that it scrolls. Adds a guide line and the values
// under the pointer to charts; without it, points and bars still have their own titles.
inline constexpr char kReportScript[] = R"js(
const units = { h: 3600, min: 60, k: 1e3, M: 1e6, G: 1e9, T: 1e12 };
const amount = text => [...text.split('±')[0].matchAll(/([-+]?[\d.,]*\d) ?(h|min|[kMGT])?/g)].reduce(
  (sum, [, number, unit]) => (sum || 0) + number.replace(/,/g, '') * (units[unit] || 1), NaN);
for (const title of document.querySelectorAll('thead th')) {
  const button = document.createElement('button');
  button.append(...title.childNodes); title.append(button);
  button.addEventListener('click', () => {
    const rising = title.ariaSort !== 'ascending', column = title.cellIndex, body = title.closest('table').tBodies[0];
    for (const other of title.parentNode.cells) other.removeAttribute('aria-sort');
    title.setAttribute('aria-sort', rising ? 'ascending' : 'descending');
    const text = row => row.cells[column].textContent;
    const compare = (a, b) => column === 0 ? text(a).localeCompare(text(b)) : amount(text(a)) - amount(text(b));
    const known = [...body.rows].filter(row => column === 0 || !isNaN(amount(text(row))));
    body.prepend(...known.sort((a, b) => rising ? compare(a, b) : compare(b, a)));
  });
}
const mark = () => document.querySelectorAll('.panel').forEach(panel =>
  panel.classList.toggle('scrolls', panel.scrollWidth > panel.clientWidth + 1));
addEventListener('resize', mark); mark();
for (const chart of document.querySelectorAll('svg.chart')) {
  const lines = [...chart.querySelectorAll('g[data-points]')].map(g => ({
    name: g.dataset.name, colour: g.classList[1],
    points: g.dataset.points.split(';').map(p => p.split('|')) }));
  if (!lines.length) continue;
  const guide = document.createElementNS('http://www.w3.org/2000/svg', 'line');
  guide.setAttribute('class', 'guide'); guide.setAttribute('y1', 32); guide.setAttribute('y2', 290);
  const tip = document.createElement('div'); tip.className = 'tip';
  const leave = () => { guide.remove(); tip.remove(); };
  chart.addEventListener('pointerleave', leave);
  const show = event => {
    const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const near = lines.map(line => line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const at = near.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    guide.setAttribute('x1', at[0]); guide.setAttribute('x2', at[0]); chart.append(guide);
    tip.replaceChildren(Object.assign(document.createElement('b'), { textContent: at[2] }));
    lines.forEach((line, i) => tip.append(Object.assign(document.createElement('div'),
      { textContent: line.name + '  ' + near[i][3], className: line.colour })));
    chart.parentNode.append(tip);
    const frame = chart.parentNode.getBoundingClientRect(), place = box.left - frame.left + at[0] / scale;
    tip.style.left = (at[0] / scale > box.width / 2 ? place - tip.offsetWidth - 12 : place + 12) + 'px';
    tip.style.top = (event.clientY - frame.top - 20) + 'px';
  };
  for (const kind of ['pointermove', 'pointerdown']) chart.addEventListener(kind, show);
}
)js";

}  // namespace convergence
