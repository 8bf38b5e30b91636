// Boxes of an answer of "Try it", drawn over the image of its input, as the model's numbers are to be read.
"use strict";
const corners = {
  xyxy: ([left, top, right, bottom]) => [left, top, right, bottom],
  yxyx: ([top, left, bottom, right]) => [left, top, right, bottom],
  xywh: ([left, top, width, height]) => [left, top, left + width, top + height],
  cxcywh: ([x, y, width, height]) => [x - width / 2, y - height / 2, x + width / 2, y + height / 2],
};

function shape(kind, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

function drawBox(svg, edges, label, colour, size) {
  const [left, top, right, bottom] = edges;
  svg.append(shape("rect", { x: left, y: top, width: Math.max(right - left, 0), height: Math.max(bottom - top, 0), class: colour }));
  if (!label) return;
  const text = shape("text", { x: left + size / 3, y: Math.max(top, size * 1.3) - size / 3, "font-size": size }, label);
  svg.append(text);
  const { x, y, width, height } = text.getBBox();
  text.before(shape("rect", { x: x - size / 3, y: y - 1, width: width + size / 1.5, height: height + 2, class: `tag ${colour}` }));
}

function drawPicture(figure) {
  const image = find("img", figure);
  const svg = find("svg", figure);
  const least = Number(find("[data-least]", figure)?.value || 0);
  const read = corners[find("[data-form]", figure)?.value || "xyxy"];
  const [width, height] = [image?.naturalWidth || 0, image?.naturalHeight || 0];
  const [across, down] = "fractions" in figure.dataset ? [1, 1] : figure.dataset.size.split(",").map(Number);
  if (svg) {
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width || 1} ${height || 1}`);
  }
  const size = Math.max(Math.max(width, height) / 34, 4);
  let count = 0;
  for (const row of all("[data-box]", figure).reverse()) { // the best is drawn last, above the others
    row.hidden = row.dataset.score !== "" && Number(row.dataset.score) < least;
    if (row.hidden) continue;
    count += 1;
    const edges = read(row.dataset.box.split(",").map(Number));
    const factors = [width / (across || width), height / (down || height)];
    const label = [row.cells[0].textContent.trim(), Number(row.dataset.score || NaN).toFixed(2)].filter((one) => one !== "NaN" && one !== "–");
    if (width) drawBox(svg, edges.map((edge, at) => edge * factors[at % 2]), label.join(" "), `colour-${row.dataset.colour}`, size);
  }
  svg?.setAttribute("aria-label", `${count} boxes`);
}

document.addEventListener("prepared", () => {
  for (const figure of all("[data-picture]:not([data-drawn])")) {
    figure.dataset.drawn = "";
    const image = find("img", figure);
    if (image) {
      image.onload = () => drawPicture(figure);
      const own = kept.get(figure.dataset.picture)?.image;
      if (own) {
        image.src = own.src;
        image.parentElement.hidden = false;
      }
    }
    drawPicture(figure);
  }
});

for (const name of ["change", "input"]) {
  document.addEventListener(name, (event) => {
    const figure = event.target.closest("[data-picture]");
    if (figure) drawPicture(figure);
  });
}
