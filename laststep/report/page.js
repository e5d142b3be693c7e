// Draws the curves of the report with plotly. Their data are in #curves, see curves.py.
"use strict";
(() => {
  const POINT_PX = 5, MIN_POINTS = 120; // where the points of a line have less room than this, neighbours are merged
  const MAX_DOTS = 40; // a line of at most this many points has a dot for each, so that a single point is visible
  const MAX_FULL_ENDS = 20; // if there are more ends of attempts, they are marked only at the foot of the figure
  const COLOURS = 6, DASHES = ["solid", "dash", "dot"]; // as in curves.py and page.css
  const {runs, figures} = JSON.parse(document.getElementById("curves").textContent);
  const hidden = new Set(); // the numbers of the runs that the reader has switched off
  const ranges = {}; // "step" and "epoch" -> what the reader has zoomed into: the figures of a unit share it
  const dark = matchMedia("(prefers-color-scheme: dark)"), touch = matchMedia("(pointer: coarse)").matches;

  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = value => value.toLocaleString("en", {maximumSignificantDigits: 4});
  const whole = value => value.toLocaleString("en");
  const plain = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // plotly reads some HTML in its texts
  const plural = (count, unit) => `${whole(count)} ${unit}${count === 1 ? "" : "s"}`;

  // A point is a row: first and last step or epoch, how many values are finite, how many are bad, mean, low, high.
  function merge(rows) {
    const [sum, count, bad] = rows.reduce(([s, n, b], row) => [s + row[4] * row[2], n + row[2], b + row[3]], [0, 0, 0]);
    const finite = rows.filter(row => row[2]);
    return {
      first: rows[0][0], last: rows.at(-1)[1], x: (rows[0][0] + rows.at(-1)[1]) / 2, count, bad, mean: sum / count,
      low: Math.min(...finite.map(row => row[5])), high: Math.max(...finite.map(row => row[6])),
    };
  }

  // The points in a range, with a neighbour on each side, merged so that at most `most` remain.
  function visible(rows, [from, to], most) {
    let begin = rows.findIndex(row => row[1] >= from), end = rows.findLastIndex(row => row[0] <= to) + 1;
    begin = Math.max(0, begin - 1);
    end = Math.min(rows.length, end + 1);
    const size = 2 ** Math.max(0, Math.ceil(Math.log2((end - begin) / most)));
    const points = [];
    for (let at = begin - begin % size; at < end; at += size) points.push(merge(rows.slice(at, at + size)));
    return points;
  }

  // What the reader sees at a point of a run.
  function explain(point, run, {unit, y_unit}) {
    const parts = [number(point.mean)];
    if (point.count > 1) parts[0] += ` (${number(point.low)} to ${number(point.high)})`;
    if (y_unit) parts[0] += ` ${y_unit}`;
    if (point.last > point.first) parts.push(`mean of ${unit}s ${whole(point.first)} to ${whole(point.last)}`);
    if (unit === "step") {
      const attempt = run.attempts.findLast(([, , start]) => start < point.last);
      if (attempt) parts.push(`attempt ${attempt[0]} (${plain(attempt[1])})`);
    }
    return runs.length > 1 ? `${plain(run.name)}: ${parts.join(", ")}` : parts.join("<br>");
  }

  function traces(figure, line, points) {
    const colour = css(`--run-${line.run % COLOURS}`), dash = DASHES[Math.floor(line.run / COLOURS) % DASHES.length];
    const finite = points.filter(point => point.count), bad = points.filter(point => point.bad);
    const x = finite.map(point => point.x), found = [], merged = points.some(point => point.last > point.first);
    if (merged) {
      const y = [...finite.map(point => point.high), ...finite.map(point => point.low).reverse()];
      const shape = {fill: "toself", fillcolor: `${colour}38`, mode: "lines", line: {width: 0}, hoverinfo: "skip"};
      found.push({...shape, x: [...x, ...x.slice().reverse()], y});
    }
    found.push({
      x, y: finite.map(point => point.mean), customdata: finite.map(point => explain(point, runs[line.run], figure)),
      mode: merged || finite.length > MAX_DOTS ? "lines" : "lines+markers", line: {color: colour, width: 2, dash},
      marker: {size: 7}, hovertemplate: "%{customdata}<extra></extra>",
    });
    found.push({
      x: bad.map(point => point.x), y: bad.map(() => 1), yaxis: "y2", mode: "markers", cliponaxis: false,
      marker: {symbol: "x-thin", size: 8, color: colour, line: {color: colour, width: 2}},
      customdata: bad.map(point => plural(point.bad, "value")),
      hovertemplate: "%{customdata} not finite or skipped<extra></extra>",
    });
    return found;
  }

  // A dotted line where an attempt ended and the next one continued.
  function ends(figure) {
    if (figure.unit !== "step") return [];
    const steps = runs.flatMap((run, at) => hidden.has(at) ? [] : run.attempts.slice(1).map(([, , start]) => [start, at]));
    const colour = at => css(runs.length > 1 ? `--run-${at % COLOURS}` : "--orderly");
    const y1 = steps.length > MAX_FULL_ENDS ? .08 : 1;
    return steps.map(([x, at]) => ({
      type: "line", yref: "paper", x0: x, x1: x, y0: 0, y1, layer: "below", line: {color: colour(at), width: 1.25, dash: "1px,4px"},
    }));
  }

  function draw(figure) {
    const rows = figure.lines.flatMap(line => line.rows);
    const low = Math.min(...rows.map(row => row[0])), high = Math.max(...rows.map(row => row[1]));
    const room = rows.length > MAX_DOTS ? 0 : (high - low) / 50 || 1; // for the first and the last dot
    const range = ranges[figure.unit] ?? [low - room, high + room];
    const most = Math.max(MIN_POINTS, figure.plot.clientWidth / POINT_PX);
    const shown = figure.lines.filter(line => !hidden.has(line.run)).map(line => [line, visible(line.rows, range, most)]);
    const points = shown.flatMap(([, points]) => points), soft = css("--soft"), grid = css("--grid");
    const axis = {color: soft, gridcolor: grid, zeroline: false, ticks: "", fixedrange: false};
    const finite = points.filter(point => point.count), family = getComputedStyle(document.body).fontFamily;
    const decades = Math.log10(Math.max(...finite.map(point => point.high)) / Math.min(...finite.map(point => point.low)));
    const title = {standoff: 8, font: {size: 12}};
    const layout = {
      xaxis: {
        ...axis, range, showgrid: false, nticks: Math.max(3, Math.round(figure.plot.clientWidth / 90)),
        dtick: range[1] - range[0] < 8 ? 1 : undefined, tickformat: range[1] < 10000 ? ",d" : "~s", title: {...title, text: figure.unit},
        unifiedhovertitle: {text: `<b>${figure.unit} %{x:,d}</b>`},
      },
      yaxis: {
        ...axis, type: figure.log ? "log" : "linear", range: figure.zoom, autorange: !figure.zoom,
        rangemode: figure.from_zero ? "tozero" : "normal",
        nticks: 6, dtick: figure.log && decades > 2 && !figure.zoom ? 1 : undefined, exponentformat: "none", title: {...title, text: figure.y_unit}, automargin: true,
      },
      yaxis2: {overlaying: "y", range: [0, 1], visible: false, fixedrange: true},
      shapes: ends(figure), showlegend: false, hovermode: "x unified", dragmode: touch ? false : "zoom",
      margin: {l: 56, r: 14, t: 8, b: 44}, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: {family, size: 12, color: soft},
      hoverlabel: {bgcolor: css("--paper"), bordercolor: css("--edge"), font: {family, size: 12, color: css("--ink")}},
    };
    const data = shown.flatMap(([line, points]) => traces(figure, line, points));
    Plotly.react(figure.plot, data, layout, {displayModeBar: false, doubleClick: false, responsive: true});
    for (const svg of figure.plot.querySelectorAll(".main-svg")) { // lets the page scale it to the width of the paper
      svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
    }
    const width = Math.max(0, ...points.map(point => point.last - point.first + 1));
    const bad = points.reduce((sum, point) => sum + point.bad, 0);
    figure.note.textContent = [
      width > 1 ? `Line: mean of ${plural(width, figure.unit)}; band: minimum to maximum.` : "",
      layout.shapes.length ? "Dotted: the end of an attempt." : "",
      bad ? `Crosses: ${plural(bad, "value")} not finite or skipped.` : "",
    ].join(" ");
    if (figure.scale) figure.scale.textContent = figure.log ? "logarithmic" : "linear";
  }

  const drawAll = unit => figures.filter(figure => !unit || figure.unit === unit).forEach(draw);

  function listen(figure) {
    figure.plot.on("plotly_relayout", change => {
      if ("xaxis.range[0]" in change) ranges[figure.unit] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if ("yaxis.range[0]" in change) figure.zoom = [change["yaxis.range[0]"], change["yaxis.range[1]"]];
      drawAll(figure.unit);
    });
    figure.plot.on("plotly_doubleclick", () => {
      delete ranges[figure.unit];
      delete figure.zoom;
      drawAll(figure.unit);
    });
    figure.scale?.addEventListener("click", () => {
      figure.log = !figure.log;
      delete figure.zoom;
      draw(figure);
    });
  }

  document.querySelectorAll("figure").forEach((element, at) => {
    const part = style => element.querySelector(style);
    Object.assign(figures[at], {plot: part(".plot"), note: part(".note"), scale: part("button")});
    draw(figures[at]);
    listen(figures[at]);
  });
  document.querySelectorAll(".legend button").forEach((button, run) => button.addEventListener("click", () => {
    if (!hidden.delete(run)) hidden.add(run);
    button.setAttribute("aria-pressed", !hidden.has(run));
    drawAll();
  }));
  dark.addEventListener("change", () => drawAll());
  matchMedia("print").addEventListener("change", () => drawAll());
})();
