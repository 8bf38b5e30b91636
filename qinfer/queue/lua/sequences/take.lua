-- Tells a worker the steps of its sequences, and which of these have ended. What it confirms is not told again.
-- KEYS: the worker's lane. ARGV: partition's prefix, whether Redis may lose, worker, the last ticket that it has ('' = none),
--   count, how many bytes of frames (at least one step is told).
-- Returns {whether the worker's lease is alive, the last ticket that was looked at, {name, life, number (0 = the life has
--   ended), token, entry id, fields, deliveries} of each}.
begin(ARGV[1], ARGV[2])
make_room()
local worker, after, most, room = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local told = {}
if tonumber(redis.call('ZSCORE', prefix .. 'sequence-owners', worker) or 0) <= now_ms() then return {0, after, {}} end

if after ~= '' then
  local ms, number = string.match(after, '^(%d+)-(%d+)$')
  redis.call('XTRIM', KEYS[1], 'MINID', string.format('%s-%.0f', ms, tonumber(number) + 1))
end
for _, ticket in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', most)) do
  local fields = {}
  for f = 1, #ticket[2], 2 do fields[ticket[2][f]] = ticket[2][f + 1] end
  local life, n, token = tonumber(fields.l), tonumber(fields.n), tonumber(fields.t)
  if fields.s and life and token then
    told[#told + 1] = {fields.s, life, 0, token, '', {}, 0}
  elseif fields.s and life and n and string.find(fields.e or '', '^%d+%-%d+$') then
    local of = load(fields.s)
    local is_mine = of and of.state == 'open' and of.owner == worker and of.life == life
    local step = is_mine and redis.call('XRANGE', steps_of(fields.s), fields.e, fields.e)[1]
    if step and step[2][1] == 'f' then
      room = room - #step[2][2]
      if room < 0 and #told > 0 then break end
      redis.call('HSET', record_of(fields.s), 'taken', n)
      local deliveries = n == of.committed + 1 and of.deaths + 1 or 1
      told[#told + 1] = {fields.s, life, n, of.token, step[1], step[2], deliveries}
    end
  end
  after = ticket[1]
end
return {1, after, told}
