-- Deliveries. A kind has in each partition a queue (a stream), and `later`, a sorted set of taken items. The score is
-- when an item is due again in ms; its fraction counts the attempts in 1024ths (exact until the year 2248).
local MOST_ATTEMPTS = 1023

local function later_of(queue) return queue .. '|later' end

-- Puts an item into a queue that lives for `lifetime` ms (nil = for ever) and drops items older than `max_age` ms;
-- returns its id.
local function deliver(queue, item, notes, lifetime, max_age)
  local oldest = max_age and string.format('%.0f', now_ms() - max_age) or '0'
  local id = redis.call('XADD', queue, 'MINID', '~', oldest, '*', 'i', item, 'n', notes)
  if lifetime and redis.call('PTTL', queue) < lifetime then
    redis.call('PEXPIRE', queue, lifetime)
    redis.call('PEXPIRE', later_of(queue), lifetime)
  end
  return id
end

local function done(queue, ...)
  redis.call('XDEL', queue, ...)
  redis.call('ZREM', later_of(queue), ...)
end

-- Returns up to `most` untaken items; `later` has the items that were read.
local function read_new(queue, most)
  if most < 1 then return {} end
  local words = {'XREADGROUP', 'GROUP', 'takers', 'taker', 'COUNT', most, 'NOACK', 'STREAMS', queue, '>'}
  local reply = redis.pcall(unpack(words))
  if reply and reply.err then
    redis.call('XGROUP', 'CREATE', queue, 'takers', '0')
    reply = redis.call(unpack(words))
  end
  return reply and reply[1][2] or {}
end

-- Takes up to `count` items, half due and half new, each for `pause` ms, doubling up to `longest`. Calls `use(id,
-- attempts, item, notes)` until it returns false for lack of room.
local function take(queue, count, pause, longest, use)
  if redis.call('EXISTS', queue) == 0 then return end
  redis.call('ZREM', later_of(queue), '') -- for full memory
  local later, now, is_full = later_of(queue), now_ms(), false

  local function hand_out(entry, score)
    local id, attempts = entry[1], math.min(math.floor(score % 1 * 1024 + 0.5) + 1, MOST_ATTEMPTS)
    local wait = math.min(pause * 2 ^ (attempts - 1), longest)
    redis.call('ZADD', later, now + wait + attempts / 1024, id)
    is_full = is_full or not use(id, attempts, entry[2][2], entry[2][4])
    if is_full then redis.call('ZADD', later, score, id) end
  end

  local before = string.format('(%.0f', now + 1)
  local due = redis.call('ZRANGEBYSCORE', later, '-inf', before, 'WITHSCORES', 'LIMIT', 0, count)
  local half = math.floor((count + now % 2) / 2) -- a single one alternates
  local new = read_new(queue, math.max(count - #due / 2, half))
  for i = 1, math.min(#due, 2 * (count - #new)), 2 do
    if is_full then break end
    local entry = redis.call('XRANGE', queue, due[i], due[i])[1]
    if entry then
      hand_out(entry, tonumber(due[i + 1]))
    else
      redis.call('ZREM', later, due[i]) -- trimmed
    end
  end
  for _, entry in ipairs(new) do hand_out(entry, now) end

  local left = redis.call('PTTL', queue)
  if #new > 0 and left > 0 then redis.call('PEXPIRE', later, left) end
end

local function retry_in(queue, id, wait)
  local later = later_of(queue)
  local score = redis.call('ZSCORE', later, id)
  if score then redis.call('ZADD', later, now_ms() + wait + tonumber(score) % 1, id) end
  return score and 1 or 0
end
