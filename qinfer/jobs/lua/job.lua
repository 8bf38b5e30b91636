-- Functions for the scripts of bulk jobs, whose first KEYS are: record, todo (sorted set: index → '<index>:<frame>'),
-- in_lane (hash: index → place), outcomes (hash: index → 'rows failed given_up error'), log, queues of webhooks and of notices.
-- A place is an entry's id; in a tenant's share of the lane, `~` and its number follow.
local DAY_MS = 86400000
local ENDED = {completed = true, failed = true, cancelled = true, expired = true}

local function change(record, ...)
  redis.call('HSET', record, 'updated_at', now_ms(), ...)
  redis.call('HINCRBY', record, 'revision', 1)
end

-- A shard's fields: scored rows of its run, why it was put off, the note for its next run.
local function scored(index) return 'scored:' .. index end

local function put_off(index) return 'put_off:' .. index end

local function resume(index) return 'resume:' .. index end

-- Leaves a notice, unless one is unread.
local function notify(id)
  if redis.call('HSETNX', KEYS[1], 'noticed', '1') == 1 then deliver(KEYS[7], id, '') end
end

local function note(text, most)
  local record, log = KEYS[1], KEYS[5]
  redis.call('RPUSH', log, string.format('%.0f %s', now_ms(), text))
  redis.call('LTRIM', log, -most, -1)
  local left = redis.call('PTTL', record)
  if left > 0 then redis.call('PEXPIRE', log, left) end
end

-- Sets state and fields; a terminal state starts the time to live and queues the webhook.
local function become(id, state, ...)
  local record = KEYS[1]
  local was, started, ended, kept, webhook =
    unpack(redis.call('HMGET', record, 'state', 'started_at', 'ended_at', 'kept_ms', 'webhook'))
  if state == 'running' and started == '0' then started = now_ms() end
  if ENDED[state] and not ENDED[was] then ended = now_ms() end
  for i = 1, 5 do -- first: after a write, full memory stops no script
    if ENDED[state] then redis.call('PEXPIRE', KEYS[i], kept) else redis.call('PERSIST', KEYS[i]) end
  end
  change(record, 'state', state, 'started_at', started, 'ended_at', ENDED[state] and ended or 0, ...)
  if ENDED[state] and not ENDED[was] and webhook ~= '' then
    redis.call('HSET', record, 'webhook_state', 'pending')
    deliver(KEYS[6], 'job:' .. id, '', kept + DAY_MS)
  end
end

local function entry_at(lane, place)
  local id, number = string.match(place, '^([^~]+)~?(%d*)$')
  return stream_of(lane, tonumber(number) or 0), id
end

-- Appends a shard to its tenant's share of the lane; returns its place.
local function append(lane, group, tenant, weight, frame)
  local route = route_of(lane, group, tenant, weight)
  local id = redis.call('XADD', route.stream, '*', 'f', frame, unpack(route.is_marked and {'d', '1'} or {}))
  return route.number == 0 and id or id .. '~' .. route.number
end

-- Moves up to `most` shards to the lane, until it has twice as many as may run; returns how many.
local function refill(lane, group, most)
  local record, todo, in_lane = KEYS[1], KEYS[2], KEYS[3]
  local parallel = tonumber(redis.call('HGET', record, 'parallel') or 1)
  local room = math.min(2 * parallel - redis.call('HLEN', in_lane), most)
  if room < 1 then return 0 end
  local tenant, weight = unpack(redis.call('HMGET', record, 'tenant', 'weight'))
  local found = redis.call('ZPOPMIN', todo, room)
  for i = 1, #found, 2 do
    local index = found[i + 1]
    local frame = string.sub(found[i], #index + 2)
    redis.call('HSET', in_lane, index, append(lane, group, tenant or '', tonumber(weight or 0), frame))
  end
  return #found / 2
end

local function has_failed(record)
  local failed, most = unpack(redis.call('HMGET', record, 'rows_failed', 'max_errors'))
  return tonumber(most) >= 0 and tonumber(failed) > tonumber(most)
end

-- Adds an outcome to the counts; a sign of -1 subtracts it.
local function count(record, outcome, sign)
  local rows, failed, given_up = string.match(outcome, '^(%d+) (%d+) (%d)')
  local function add(field, number) redis.call('HINCRBY', record, field, string.format('%d', sign * number)) end -- HINCRBY rejects -0
  add('rows_done', rows - failed)
  add('rows_failed', failed)
  add(given_up == '1' and 'shards_failed' or 'shards_done', 1)
end

-- Puts a shard into todo, replacing an earlier frame.
local function put(todo, index, frame)
  local member = index .. ':' .. frame
  redis.call('ZADD', todo, index, member)
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', todo, index, index)) do
    if other ~= member then redis.call('ZREM', todo, other) end
  end
end
