-- What the scripts of deliveries share. A kind has two keys in each partition: its queue, a stream of the items that are not
-- done; and `later`, a sorted set of the ids of those that were taken. A score is the time in ms at which an item is due
-- again, and its fraction says how often it was taken, in 1024ths (which a double holds exactly until the year 2248).
local MOST_ATTEMPTS = 1023

local function later_of(queue) return queue .. '|later' end

-- Puts an item into a queue, which lives for `lifetime` ms at least (nil = for ever), and returns the item's id.
-- `max_age`: items that were put so many ms ago are dropped (nil = none is).
local function deliver(queue, item, notes, lifetime, max_age)
  local oldest = max_age and string.format('%.0f', now_ms() - max_age) or '0'
  local id = redis.call('XADD', queue, 'MINID', '~', oldest, '*', 'i', item, 'n', notes)
  if lifetime and redis.call('PTTL', queue) < lifetime then
    redis.call('PEXPIRE', queue, lifetime)
    redis.call('PEXPIRE', later_of(queue), lifetime)
  end
  return id
end

-- Removes items, whoever took them.
local function done(queue, ...)
  redis.call('XDEL', queue, ...)
  redis.call('ZREM', later_of(queue), ...)
end

-- Returns up to `most` items that were never taken. The group only knows how far it has read: what it has read is in `later`.
local function read_new(queue, most)
  if most < 1 then return {} end
  local words = {'XREADGROUP', 'GROUP', 'takers', 'taker', 'COUNT', most, 'NOACK', 'STREAMS', queue, '>'}
  local reply = redis.pcall(unpack(words))
  if reply and reply.err then -- there is no group yet
    redis.call('XGROUP', 'CREATE', queue, 'takers', '0')
    reply = redis.call(unpack(words))
  end
  return reply and reply[1][2] or {}
end

-- Takes up to `count` items: those that are due again and new ones, half of them each where there are enough of both, so that
-- neither hold up the others. Each is due again after `pause` ms, twice as many at each attempt, `longest` at most.
-- `use(id, attempts, item, notes)` is called with each; where it returns false there is no room: the rest is not taken.
local function take(queue, count, pause, longest, use)
  if redis.call('EXISTS', queue) == 0 then return end
  redis.call('ZREM', later_of(queue), '') -- changes nothing, but is a write: after one, full memory stops no script
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
  local half = math.floor((count + now % 2) / 2) -- of a single one now and then all
  local new = read_new(queue, math.max(count - #due / 2, half))
  for i = 1, math.min(#due, 2 * (count - #new)), 2 do
    if is_full then break end
    local entry = redis.call('XRANGE', queue, due[i], due[i])[1]
    if entry then
      hand_out(entry, tonumber(due[i + 1]))
    else
      redis.call('ZREM', later, due[i]) -- it was trimmed
    end
  end
  for _, entry in ipairs(new) do hand_out(entry, now) end

  local left = redis.call('PTTL', queue)
  if #new > 0 and left > 0 then redis.call('PEXPIRE', later, left) end
end

-- Has an item that was taken come again after so many ms: later because it failed, or because who has it needs longer.
local function retry_in(queue, id, wait)
  local later = later_of(queue)
  local score = redis.call('ZSCORE', later, id)
  if score then redis.call('ZADD', later, now_ms() + wait + tonumber(score) % 1, id) end
  return score and 1 or 0
end
