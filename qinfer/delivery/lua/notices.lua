-- Takes notices: those that were taken long enough ago and not confirmed, then new ones.
-- KEYS: outbox. ARGV: group, consumer, count, ms until the first repetition, ms until the latest, where to begin among
--   those taken before, ms after which a consumer is gone.
-- Returns {where to begin next time, {{id, id of the request or job, deliveries, its kind (r | j)} per notice}}.
local outbox = KEYS[1]
local group, consumer, left, retry, latest = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local start, gone = ARGV[6], tonumber(ARGV[7])
local PAGE, PAGES = 100, 10 -- a receiver that is down for hours leaves many that rest: they are not all looked at each time
local taken = {}

if redis.call('EXISTS', outbox) == 0 then return {'-', taken} end
if redis.pcall('XPENDING', outbox, group).err then -- there is no group yet
  redis.call('XACK', outbox, group, '0-0') -- changes nothing, but is a write: after one, full memory stops no script
  redis.call('XGROUP', 'CREATE', outbox, group, '0')
end

local function take(id, deliveries, entry)
  taken[#taken + 1] = {id, entry[2][2], deliveries, entry[2][1]}
  left = left - 1
end

local pages = 0
repeat
  local page = redis.call('XPENDING', outbox, group, 'IDLE', retry, start, '+', PAGE)
  start = '-'
  for number, pending in ipairs(page) do
    local id, idle, deliveries = pending[1], pending[3], pending[4]
    if idle >= math.min(retry * 2 ^ (deliveries - 1), latest) then
      local entry = redis.call('XCLAIM', outbox, group, consumer, 0, id)[1]
      if entry then
        take(id, deliveries + 1, entry)
      else
        redis.call('XACK', outbox, group, id) -- its body is gone; 6.2 keeps such an id for ever
      end
    end
    if left == 0 or number == PAGE then
      start = '(' .. id
      break
    end
  end
  pages = pages + 1
until start == '-' or left == 0 or pages == PAGES

if left > 0 then
  local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', left, 'STREAMS', outbox, '>')
  for _, entry in ipairs(reply and reply[1][2] or {}) do take(entry[1], 1, entry) end
end

forget_consumers(outbox, group, gone)
return {start, taken}
