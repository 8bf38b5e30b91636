// A shared worker: one stream of server-sent events for all of the console's pages in a browser, because browsers allow
// six connections to a server over HTTP/1.1. It is closed while every page is hidden.
"use strict";
const ports = new Map(); // port → whether its page is visible
const figures = {}; // the last known ones, for pages that open later
let source = null;

function tell(message) {
  for (const port of ports.keys()) port.postMessage(message);
}

function follow() {
  const wanted = [...ports.values()].some(Boolean);
  if (!wanted && source) {
    source.close();
    source = null;
  } else if (wanted && !source) {
    source = new EventSource("../live"); // beside the folder of this file
    source.onopen = () => tell({ state: "live" });
    source.onerror = () => tell({ state: source && source.readyState === 2 ? "off" : "away" });
    source.addEventListener("figures", (event) => {
      const changed = JSON.parse(event.data);
      Object.assign(figures, changed);
      tell({ state: "live", figures: changed });
    });
    source.addEventListener("topics", (event) => tell({ topics: JSON.parse(event.data) }));
  }
}

onconnect = (event) => {
  const port = event.ports[0];
  port.onmessage = ({ data }) => {
    if (data === "bye") ports.delete(port);
    else ports.set(port, data === "visible");
    if (data === "visible" && source && source.readyState === 1) port.postMessage({ state: "live", figures });
    follow();
  };
};
