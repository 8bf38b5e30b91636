-- Tells a worker the steps of its sequences, and which have ended; what was told before is not told again.
-- KEYS: the worker's lane. ARGV: prefix, is_fragile, worker, last entry of the lane that was told ('' = none), count, most
--   bytes of frames, first entry of the lane that is still needed ('' = none).
-- Returns {whether the lease is alive, last entry told, {name, life, number (0 = not known), token, entry id, fields,
--   deliveries, what} of each, era}. `what`: ticket | step (in the lane itself) | over | restart | cancel.
begin(ARGV[1], ARGV[2])
make_room()
local worker, after, most, room = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local told = {}

-- Returns the fields of a step whose ticket has no frame.
local function read(name, entry)
  local step = redis.call('XRANGE', steps_of(name), entry, entry)[1]
  return step and step[2][1] == 'f' and step[2]
end

if tonumber(redis.call('ZSCORE', prefix .. 'sequence-owners', worker) or 0) <= now then return {0, after, {}, era} end

if after ~= '' then
  local ms, number = string.match(after, '^(%d+)-(%d+)$')
  redis.call('XTRIM', KEYS[1], 'MINID', ARGV[7] ~= '' and ARGV[7] or string.format('%s-%.0f', ms, tonumber(number) + 1))
end
for _, ticket in ipairs(redis.call('XRANGE', KEYS[1], after == '' and '-' or '(' .. after, '+', 'COUNT', most)) do
  local fields = fields_of(ticket)
  local life, n, token = tonumber(fields.l), tonumber(fields.n), tonumber(fields.t)
  local is_known = fields.s and life and token
  if is_known and fields.f and not fields.e then
    room = room - #fields.f
    if room < 0 and #told > 0 then break end
    told[#told + 1] = {fields.s, life, 0, token, ticket[1], {'f', fields.f, 'p', fields.p or '', 'm', fields.m or '',
      'g', fields.g or '', 'k', fields.k or ''}, 1, 'step'}
  elseif is_known and fields.r then
    told[#told + 1] = {fields.s, life, 0, token, '', {}, 0, 'restart'}
  elseif is_known and fields.c then
    told[#told + 1] = {fields.s, life, n or 0, token, fields.x or '', {'c', fields.c}, 0, 'cancel'}
  elseif is_known and not fields.n then
    told[#told + 1] = {fields.s, life, 0, token, '', {}, 0, 'over'}
  elseif is_known and n and string.find(fields.e or '', '^%d+%-%d+$') then
    local step = fields.f and {'f', fields.f, 'p', fields.p or ''} or read(fields.s, fields.e)
    if step then
      room = room - #step[2]
      if room < 0 and #told > 0 then break end
      told[#told + 1] = {fields.s, life, n, token, fields.e, step, tonumber(fields.times) or 1, 'ticket'}
    end
  end
  after = ticket[1]
end
return {1, after, told, era}
