"""The preview page: one file, no address but the server's own."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Tandem preview</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.4 system-ui, sans-serif; margin: 1rem; background: Canvas; color: CanvasText; }
#cameras { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); }
figure { margin: 0; }
figure img { width: 100%; height: auto; background: #8884; border-radius: 6px; }
figcaption { display: flex; gap: 1rem; flex-wrap: wrap; font-variant-numeric: tabular-nums; }
figcaption b { margin-right: auto; }
table { border-collapse: collapse; margin-top: 1rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.15rem 0.9rem 0.15rem 0; }
th:first-child, td:first-child { text-align: left; }
#state { font-weight: 600; }
.lost { color: #c33; }
</style>
</head>
<body>
<h1 id="name">Tandem</h1>
<p id="state">waiting for the first frame</p>
<div id="cameras"></div>
<table id="stages">
<thead><tr><th>stage</th><th>p50 ms</th><th>p99 ms</th></tr></thead><tbody></tbody>
</table>
<p id="dropped"></p>
<script>
"use strict";
const known = new Map();
const element = (tag, text = "") => Object.assign(document.createElement(tag), {textContent: text});

function cameraView(camera) {
  if (!known.has(camera.id)) {
    const figure = element("figure"), image = element("img"), caption = element("figcaption");
    image.src = "stream/" + encodeURIComponent(camera.id);
    image.alt = "live picture of " + (camera.id || "the camera");
    figure.append(image, caption);
    document.getElementById("cameras").append(figure);
    known.set(camera.id, caption);
  }
  return known.get(camera.id);
}

function show(status) {
  document.getElementById("name").textContent = status.pipeline;
  const state = document.getElementById("state");
  state.className = "";
  state.textContent = status.stats === null ? "waiting for the first figures" :
    `${status.stats.fps.toFixed(1)} frames/s, ${status.stats.latency_p50_ms.toFixed(1)} ms from ` +
    `frame to result (p99 ${status.stats.latency_p99_ms.toFixed(1)} ms)`;
  for (const camera of status.cameras) {
    const name = element("b", camera.id || camera.source);
    const texts = [`frame ${camera.seq}`, `${camera.detections} found`,
                   `${camera.age_ms.toFixed(0)} ms old`];
    cameraView(camera).replaceChildren(name, ...texts.map(text => element("span", text)));
  }
  if (status.stats === null) return;
  const rows = Object.entries(status.stats.stage_p50_ms).map(([stage, p50]) => {
    const row = element("tr");
    row.append(element("td", stage), element("td", p50.toFixed(2)),
               element("td", status.stats.stage_p99_ms[stage].toFixed(2)));
    return row;
  });
  document.querySelector("#stages tbody").replaceChildren(...rows);
  const drops = Object.entries(status.stats.dropped).map(([cause, n]) => `${n} ${cause}`);
  document.getElementById("dropped").textContent = "dropped: " + (drops.join(", ") || "none");
}

async function poll() {
  try {
    const answer = await fetch("status.json", {cache: "no-store"});
    show(await answer.json());
  } catch (error) {
    const state = document.getElementById("state");
    state.className = "lost";
    state.textContent = "the pipeline has ended";
  }
  setTimeout(poll, 500);
}
poll();
</script>
</body>
</html>
"""
