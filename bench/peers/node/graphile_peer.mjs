// Graphile Worker: the commands of ../driver.py, in JavaScript. `produce` is in ../graphile_producer.py.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

// Its per-job log line would dominate the measurement; the library reads this when it is loaded.
process.env.NO_LOG_SUCCESS = "1";

const require = createRequire(new URL("../../../.peers/node/package.json", import.meta.url));
const { Logger, WorkerPreset, makeWorkerUtils, run } = await import(pathToFileURL(require.resolve("graphile-worker")));
const pg = require("pg");

const BATCH = 1000;
const LOOK_EVERY_MS = 50;
const LEFT = "select exists (select from graphile_worker._private_jobs) as any";

// The configuration of "Performance" in its documentation.
const CONCURRENT_JOBS = 24;
const THROUGHPUT = { localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 };

const { positionals, values: given } = parseArgs({
  allowPositionals: true,
  options: {
    dsn: { type: "string" },
    count: { type: "string", default: "10000" },
    rate: { type: "string", default: "50" },
    seconds: { type: "string", default: "10" },
    harness: { type: "boolean", default: false },
  },
});

const seconds = () => (performance.timeOrigin + performance.now()) / 1000;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const say = (line) => new Promise((resolve) => process.stdout.write(JSON.stringify(line) + "\n", resolve));
const args = (n) => ({ to: `user${n}@example.com`, n });
const quiet = new Logger(() => (level, message) => level === "error" && console.error(message));

// The process that started this one, if any: the lines that it sends to our stdin, and its end.
const go = given.harness
  ? new Promise((resolve) => process.stdin.once("data", resolve).once("end", () => process.exit(3)))
  : Promise.resolve();
const ready = async () => given.harness && say({ ready: true });

const preset = (worker) => ({
  extends: [WorkerPreset],
  worker: {
    connectionString: given.dsn,
    concurrentJobs: CONCURRENT_JOBS,
    maxPoolSize: CONCURRENT_JOBS + 1,
    logger: quiet,
    ...worker,
  },
});

async function install() {
  const utils = await makeWorkerUtils({ preset: preset({}) });
  await utils.migrate();
  await utils.release();
  return { installed: true };
}

async function enqueue(count) {
  const utils = await makeWorkerUtils({ preset: preset({}) });
  const began = seconds();
  for (let first = 0; first < count; first += BATCH) {
    const numbers = Array.from({ length: Math.min(BATCH, count - first) }, (_, i) => first + i);
    await utils.addJobs(numbers.map((n) => ({ identifier: "noop", payload: args(n) })));
  }
  const took = seconds() - began;
  await utils.release();
  return { count, seconds: took };
}

async function drain() {
  const look = new pg.Client({ connectionString: given.dsn });
  await look.connect();
  await ready();
  await go;
  let done = 0;
  let firstStart = 0;
  let lastEnd = 0;
  const noop = async () => {
    const now = seconds();
    if (done++ === 0) firstStart = now;
    lastEnd = now;
  };
  const runner = await run({ preset: preset(THROUGHPUT), taskList: { noop }, noHandleSignals: true });
  // The database is asked only if no job ended here between two checks.
  for (let before = -1; ; before = done) {
    await sleep(LOOK_EVERY_MS);
    if (done === before && !(await look.query(LEFT)).rows[0].any) break;
  }
  await runner.stop();
  await look.end();
  return { done, first_start: firstStart, last_end: lastEnd };
}

async function latency(count) {
  const starts = [];
  let warm = false;
  let finished;
  const all = new Promise((resolve) => (finished = resolve));
  const noop = async ({ n }) => {
    const now = seconds();
    if (!warm) {
      warm = true;
      ready();
    }
    if (n >= 0 && starts.push([n, now]) >= count) finished();
  };
  const runner = await run({ preset: preset({}), taskList: { noop }, noHandleSignals: true });
  await all;
  await runner.stop();
  return { starts };
}

const commands = {
  install,
  enqueue: () => enqueue(Number(given.count)),
  drain,
  latency: () => latency(Math.round(Number(given.rate) * Number(given.seconds))),
};

const command = commands[positionals[0]];
if (!command || !given.dsn) {
  console.error(`usage: graphile_peer.mjs ${Object.keys(commands).join("|")} --dsn DSN ...`);
  process.exit(2);
}
await say(await command());
process.exit(0);
