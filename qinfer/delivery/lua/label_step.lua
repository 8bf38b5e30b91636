-- Stores tasks of a labeling project, and removes what has been over for too long.
-- KEYS: entries, data, due, ended, boards, then the index of each state.
-- ARGV: what (put: only for other requests | move: only for the same), this board's name, milliseconds: until those that
--   wait may be claimed, time to live; the number of the states; their names; then by fives: task, request, state, entry,
--   data.
-- Returns whether each was stored, 1 or 0.
local entries, data, due, ended, boards = unpack(KEYS, 1, 5)
local what, board, wait, ttl, count = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now, stored = now_ms(), {}

local function index(task, state)
  for i = 1, count do
    if ARGV[5 + i] == state then
      redis.call('ZADD', KEYS[5 + i], task, task)
    else
      redis.call('ZREM', KEYS[5 + i], task)
    end
  end
  if state == 'waiting' then redis.call('ZADD', due, now + wait, task) else redis.call('ZREM', due, task) end
  if state == 'done' or state == 'failed' then
    redis.call('ZADD', ended, now, task)
  else
    redis.call('ZREM', ended, task)
  end
end

if what == 'move' then redis.call('HDEL', data, '') end -- after a write full memory stops no script: tasks end
for i = 6 + count, #ARGV, 5 do
  local task, request, state = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local known = redis.call('HGET', entries, task)
  local is_same = known and string.sub(known, 1, #request + 1) == request .. '\n'
  local is_wanted = not known or (what == 'put') == not is_same
  if what == 'move' and (state == 'open' or state == 'waiting') then
    is_wanted = is_same and redis.call('ZSCORE', due, task) -- else it has come further
  end
  if is_wanted then
    redis.call('HSET', entries, task, request .. '\n' .. ARGV[i + 3])
    if ARGV[i + 4] == '' then redis.call('HDEL', data, task) else redis.call('HSET', data, task, ARGV[i + 4]) end
    index(task, state)
  end
  stored[#stored + 1] = is_wanted and 1 or 0
end

for _, task in ipairs(redis.call('ZRANGEBYSCORE', ended, '-inf', now - ttl, 'LIMIT', 0, 100)) do
  redis.call('HDEL', entries, task)
  redis.call('ZREM', ended, task)
  for i = 1, count do redis.call('ZREM', KEYS[5 + i], task) end
end
redis.call('ZADD', boards, now + math.max(2 * ttl, 60000), board)
redis.call('ZREMRANGEBYSCORE', boards, '-inf', now)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, math.max(2 * ttl, 60000)) end
return stored
