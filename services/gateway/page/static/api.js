// Requests to the gateway that served this page. The key stays in this tab.
const KEY = "lockstep-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

export async function ask(path, { body, signal } = {}) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
  if (!response.ok) {
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? `the gateway answered ${response.status}`);
  }
  return response;
}

// The events of a stream, until [DONE]. An event with an error is thrown.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the stream broke off");
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment keeps the connection open
      const data = block.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
