-- Removes a shard's entry regardless of the owner; records the outcome if the entry is the job's current one.
-- KEYS: as in job.lua, lane, for 'bury' dead letters.
-- ARGV: id, group, place, index, finish | drop | bury, outcome ('rows failed given_up error'), log lines to keep, most shards to
--   move; for 'bury' also: owner, version and name of the lane, error code, reason, dead letters' age in ms and bytes to keep.
-- Returns 1 if recorded or buried, else 0.
local record, todo, in_lane, outcomes, lane, letters = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[8], KEYS[9]
local id, group, place, index, what, outcome, lines, most = unpack(ARGV, 1, 8)
local stream, entry = entry_at(lane, place)

local is_buried = what == 'bury' and 1 or 0
local body = what ~= 'finish' and redis.call('XRANGE', stream, entry, entry)[1]
if what == 'bury' then
  local owner, name, code, reason, age, bytes = unpack(ARGV, 9)
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1, owner) -- an error if the stream is gone
  if pending.err or not pending[1] or not body then return 0 end
  redis.call('XACK', stream, group, '0-0') -- no effect: after a write, full memory stops no script
  local size = #body[2][2]
  local letter = redis.call('XADD', letters, '*', 'lane', name, 'request_id', id, 'code', code, 'reason', reason,
    'deliveries', pending[1][4], 'size', size, 'frame', body[2][2], 'payload', '')
  trim_letters(letters, letter, size, tonumber(age), tonumber(bytes))
end
redis.call('XACK', stream, group, entry)
redis.call('XDEL', stream, entry)
if redis.call('HGET', in_lane, index) ~= place then return is_buried end
redis.call('HDEL', in_lane, index)
redis.call('HDEL', record, scored(index), put_off(index), resume(index))

local state = redis.call('HGET', record, 'state')
if not state then return is_buried end
local is_counted = what ~= 'drop' and not ENDED[state]
if is_counted then
  local known = redis.call('HGET', outcomes, index)
  if known then count(record, known, -1) end
  redis.call('HSET', outcomes, index, outcome)
  count(record, outcome, 1)
  local problem = string.match(outcome, '^%d+ %d+ 1 (.*)$')
  if problem then note('shard ' .. index .. ' was given up: ' .. problem, lines) end
elseif body and (state == 'running' or state == 'planning') then
  put(todo, index, body[2][2])
end
local is_failed = has_failed(record)
if state == 'running' and not is_failed then refill(lane, group, tonumber(most)) end
local held = redis.call('HLEN', in_lane)
change(record, 'in_lane', held)
if not ENDED[state] and (is_failed or held == 0 and redis.call('ZCARD', todo) == 0) then notify(id) end
return math.max(is_buried, is_counted and 1 or 0)
