-- Records a gateway's use of a tenant's quota, and leases it a part of the rest: half equally, half by demand. Others
-- keep theirs until their own exchange.
-- KEYS: the quota, a hash: level (all tokens; negative = a debt), at (ms), and of each gateway '<tokens> <demand> <in
--   flight> <places> <until in ms>'.
-- ARGV: gateway, rate (per s), burst, places, used, demand, in flight, lease (ms, 0 = it leaves).
-- Returns {tokens, level, part, places}, the first three as texts.
local key, gateway = KEYS[1], ARGV[1]
local rate, burst, most, used, demand, flying, lease = unpack(ARGV, 2)
rate, burst, most, used = tonumber(rate), tonumber(burst), tonumber(most), tonumber(used)
demand, flying, lease = tonumber(demand), tonumber(flying), tonumber(lease)

local now, level, at = now_ms(), burst, nil
local count, demands, held, all_flying, taken = 1, demand, 0, flying, 0
local found = redis.call('HGETALL', key)
for i = 1, #found, 2 do
  local field, value = found[i], found[i + 1]
  if field == 'level' then
    level = tonumber(value)
  elseif field == 'at' then
    at = tonumber(value)
  elseif field ~= gateway then
    local tokens, its_demand, its_flying, places, ends = string.match(value, '^(%S+) (%S+) (%S+) (%S+) (%S+)$')
    if tonumber(ends) < now then
      redis.call('HDEL', key, field)
    else
      count, demands, held = count + 1, demands + its_demand, held + tokens
      all_flying, taken = all_flying + its_flying, taken + places
    end
  end
end

level = math.min(burst, level - used + rate * math.max(now - (at or now), 0) / 1000)
local part = 0.5 / count + 0.5 * (demands > 0 and demand / demands or 1 / count)
local tokens = math.max(math.min(level * part, level - held), 0)
local places = math.max(flying, math.min(math.ceil(flying + (most - all_flying) * part), most - taken))

redis.call('HSET', key, 'level', string.format('%.9f', level), 'at', now)
if lease > 0 then
  local about = string.format('%.9f %.3f %d %d %.0f', tokens, demand, flying, places, now + lease)
  redis.call('HSET', key, gateway, about)
else
  redis.call('HDEL', key, gateway)
end
redis.call('PEXPIRE', key, math.max(lease, 1000 * math.ceil(rate > 0 and (burst - level) / rate or 0)) + 60000)
return {string.format('%.9f', tokens), string.format('%.9f', level), string.format('%.9f', part), places}
