// Opens a page in a browser, runs a script in it, and prints what that returns, what the page loaded, and its errors.
// Arguments: the browser, the page's address, the script's file, a value for it.
const fs = require("node:fs");
const puppeteer = require("puppeteer-core");

async function main([executablePath, address, file, value]) {
  const browser = await puppeteer.launch({ executablePath });
  try {
    const page = await browser.newPage();
    const loaded = [], errors = [];
    page.on("request", (request) => loaded.push(request.url()));
    page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
    page.on("pageerror", (error) => errors.push(String(error)));
    await page.goto(address, { waitUntil: "networkidle0" });
    const found = await page.evaluate(`(${fs.readFileSync(file, "utf8")})(${value})`);
    console.log(JSON.stringify({ found, loaded, errors }));
  } finally {
    await browser.close();
  }
}

main(process.argv.slice(2));
