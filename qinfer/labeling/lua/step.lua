-- Stores tasks of a labeling project, and removes those that ended too long ago.
-- KEYS: entries, data, queue of waiting tasks, ended, boards, index of each state (`waiting` first).
-- ARGV: what (put: replaces other requests | move: changes the same request), board, ms until waiting tasks may be
--   claimed again, ms to live, most waiting tasks (for put), number of states, their names; then for each task: task,
--   request, state, entry, data.
-- Returns for each task: 1 stored, 0 unchanged, 2 refused because too many wait.
-- An entry: request, a line with its item in the queue ('' = not waiting), task.
local entries, data, queue, ended, boards, waiting = unpack(KEYS, 1, 6)
local what, board, wait, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local room, count = tonumber(ARGV[5]) - redis.call('ZCARD', waiting), tonumber(ARGV[6])
local now, placed, kept = now_ms(), {}, math.max(2 * ttl, 60000)

-- Returns the task's item in the queue.
local function queued(task, state, item)
  if state ~= 'waiting' then
    if item ~= '' then done(queue, item) end
    return ''
  end
  if item == '' then return deliver(queue, task, '', kept) end
  retry_in(queue, item, wait)
  return item
end

local function index(task, state)
  for i = 1, count do
    if ARGV[6 + i] == state then
      redis.call('ZADD', KEYS[5 + i], task, task)
    else
      redis.call('ZREM', KEYS[5 + i], task)
    end
  end
  if state == 'done' or state == 'failed' then
    redis.call('ZADD', ended, now, task)
  else
    redis.call('ZREM', ended, task)
  end
end

if what == 'move' then redis.call('HDEL', data, '') end -- a first write lets the script finish even if memory is full
for i = 7 + count, #ARGV, 5 do
  local task, request, state = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local of, item = string.match(redis.call('HGET', entries, task) or '\n', '^([^\n]*)\n([^\n]*)')
  local is_same, is_known = of == request, of ~= ''
  local is_wanted = not is_known or (what == 'put') == not is_same
  if what == 'move' and (state == 'open' or state == 'waiting') then
    is_wanted = is_same and item ~= '' -- otherwise the task has advanced
  end
  local adds = is_wanted and what == 'put' and item == ''
  if adds and room < 1 then
    placed[#placed + 1] = 2
  elseif is_wanted then
    if adds then room = room - 1 end
    redis.call('HSET', entries, task, request .. '\n' .. queued(task, state, item) .. '\n' .. ARGV[i + 3])
    if ARGV[i + 4] == '' then redis.call('HDEL', data, task) else redis.call('HSET', data, task, ARGV[i + 4]) end
    index(task, state)
    placed[#placed + 1] = 1
  else
    placed[#placed + 1] = 0
  end
end

for _, task in ipairs(redis.call('ZRANGEBYSCORE', ended, '-inf', now - ttl, 'LIMIT', 0, 100)) do
  redis.call('HDEL', entries, task)
  redis.call('ZREM', ended, task)
  for i = 1, count do redis.call('ZREM', KEYS[5 + i], task) end
end
redis.call('ZADD', boards, now + kept, board)
redis.call('ZREMRANGEBYSCORE', boards, '-inf', now)
for _, key in ipairs({later_of(queue), unpack(KEYS)}) do redis.call('PEXPIRE', key, kept) end
return placed
