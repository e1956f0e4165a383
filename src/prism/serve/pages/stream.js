// Server-sent events by fetch: EventSource can neither POST nor send a key.

import { reason, request } from "./common.js";

/** The JSON of every `data:` line of an answer, as it arrives; ends at [DONE]. */
export async function* events(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(await reason(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message ?? "The server stopped with an error.");
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
