-- Takes messages: those with an ended lease first, then new ones, oldest first. A repeated call, whose reply was lost,
-- gets the same messages.
-- KEYS: leases, taken, oversized, then the lists.
-- ARGV: nonce, lease in ms, most messages, bytes after which no more are taken, most bytes of a message.
-- Returns id, size in bytes, and text of each message; no text for larger ones.
local leases, taken, oversized = KEYS[1], KEYS[2], KEYS[3]
local nonce, most, enough, largest = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()
local ends, found, bytes = now + tonumber(ARGV[2]), {}, 0

for index, key in ipairs(KEYS) do
  local kind, needed = redis.call('TYPE', key)['ok'], index == 1 and 'zset' or index <= 3 and 'hash' or 'list'
  if kind ~= 'none' and kind ~= needed then
    return redis.error_reply("ERR the key '" .. key .. "' is of type " .. kind .. ', and the bridge needs a ' ..
      needed .. '; name another queue, or remove the key')
  end
end

-- A full Redis refuses writes that need memory, unless the script has written before: this lets the list be emptied.
redis.call('ZREM', leases, nonce)

local function give(id, size, text)
  redis.call('ZADD', leases, ends, id)
  local last = #found
  found[last + 1], found[last + 2], found[last + 3] = id, size, text
  bytes, most = bytes + (text and size or 0), most - 1
end

-- Gives a taken message again; returns false if it is gone.
local function give_again(id)
  local text = redis.call('HGET', taken, id)
  local size = text and #text or redis.call('HSTRLEN', oversized, id)
  if not text and size == 0 then return false end
  give(id, size, text)
  return true
end

local ids = 0
while give_again(nonce .. '-' .. (ids + 1)) do ids = ids + 1 end
if ids > 0 then return found end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, most)) do
  if bytes >= enough then break end
  if not give_again(id) then redis.call('ZREM', leases, id) end
end
for list = 4, #KEYS do
  while most > 0 and bytes < enough do
    local text = redis.call('LINDEX', KEYS[list], -1)
    if not text then break end
    ids = ids + 1
    local id, size = nonce .. '-' .. ids, #text
    local place = size > largest and oversized or taken
    -- Removed last: a refused step, such as by an ACL, must not lose the message.
    redis.call('ZADD', leases, ends, id)
    redis.call('HSET', place, id, text)
    local removed = redis.pcall('RPOP', KEYS[list])
    if type(removed) == 'table' then
      redis.call('HDEL', place, id)
      redis.call('ZREM', leases, id)
      return removed
    end
    give(id, size, size <= largest and text)
  end
end
return found
