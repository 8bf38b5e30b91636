// What a reader of /docs sees: the operations, the ways to present a key, and the answer to a call that is tried out.
async () => {
  const until = async (look) => {
    for (let turn = 0; turn < 500; turn++) {
      const found = look();
      if (found) return found;
      await new Promise((resume) => setTimeout(resume, 20));
    }
    throw new Error(`not there: ${look}`);
  };
  const one = (selector) => document.querySelector(selector);

  const tags = await until(() => document.querySelectorAll(".opblock-tag").length);
  one(".btn.authorize").click();
  const schemes = await until(() => document.querySelectorAll(".auth-container h4 code").length);
  one(".btn-done").click();
  [...document.querySelectorAll(".opblock-tag")].find((tag) => tag.dataset.tag === "server").click();
  const live = await until(() => one('[data-path="/v2/health/live"]'));
  live.click();
  (await until(() => one(".try-out__btn"))).click();
  (await until(() => one(".btn.execute"))).click();
  const status = await until(() => one(".live-responses-table tbody .response-col_status")?.textContent.trim());
  return { tags, schemes, status };
}
