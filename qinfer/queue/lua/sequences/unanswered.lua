-- Returns unanswered steps of ended lives; steps that are not finished are returned again later. Then steps of closed
-- lanes, which are to be submitted anew.
-- KEYS: the endings, the closed lanes. ARGV: prefix, is_fragile, count, most bytes of frames.
-- Returns {name, life, number, entry id, fields, whether the response is stored, code, text, failed step, closed lane ('' =
--   none)} of each.
local MOST_PAGES = 16 -- to look at, as the steps of open lives wait for their next owner
begin(ARGV[1], ARGV[2])
make_room()
local left, room, found = tonumber(ARGV[3]), tonumber(ARGV[4]), {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, left)) do
  local of, is_any = load(name), false
  each_step(name, function(id, step)
    local life, n = tonumber(step.l), tonumber(step.n)
    if of and of.state == 'open' and life >= of.life then return false end
    is_any = true
    room = room - #step.f
    if left <= 0 or (room < 0 and #found > 0) then return false end
    local why = of and of.failed_life >= life and {of.code, of.text, of.failed} or {'', '', 0}
    found[#found + 1] = {name, life, n, id, {'f', step.f, 'p', step.p or ''},
      has_answer(name, life, n) and 1 or 0, why[1], why[2], why[3], ''}
    left = left - 1
  end)
  if is_any then
    redis.call('ZADD', KEYS[1], now + GRACE_MS, name)
  else
    redis.call('ZREM', KEYS[1], name)
    if of and of.state ~= 'open' then forget(of) end
  end
  if left <= 0 or room < 0 then break end
end
for _, lane in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if left <= 0 or room < 0 then break end
  local after, pages, known = '-', 0, {}
  while after and pages < MOST_PAGES and left > 0 and room >= 0 do
    local page = redis.call('XRANGE', prefix .. lane, after, '+', 'COUNT', 32)
    for _, entry in ipairs(page) do
      local fields = fields_of(entry)
      local name, life = fields.s or '', tonumber(fields.l)
      if known[name] == nil then known[name] = load(name) or false end
      if fields.e or not is_adopters(known[name], life) then
        local is_step = fields.f and not fields.e and life
        room = room - (is_step and #fields.f or 0)
        if left <= 0 or (room < 0 and #found > 0) then break end
        if is_step then
          found[#found + 1] = {name, life, 0, entry[1], {'f', fields.f, 'p', fields.p or ''}, 0, '', '', 0, lane}
          left = left - 1
        else
          redis.call('XDEL', prefix .. lane, entry[1]) -- a ticket
        end
      end
    end
    pages, after = pages + 1, #page == 32 and '(' .. page[32][1]
  end
  if redis.call('XLEN', prefix .. lane) == 0 then
    redis.call('UNLINK', prefix .. lane)
    redis.call('SREM', KEYS[2], lane)
  end
end
return found
