-- Appends a step to a sequence, or to the lane of an owner that reads steps there. START begins a life behind the executing
-- one. A repeated numbered step gets the stored response, or waits behind the first of its number.
-- KEYS: record. ARGV: prefix, is_fragile, name, flags (S, E, SE or ''), number (0 = none), hash of a START's content,
--   frame, request with the payload ('' = none), timeout (ms), limit of waiting steps and of open sequences (0 = none),
--   weight (0 = unknown), and of a START `<version> <generation> <kind> <idle ms>`; its gateway, and
--   how many steps that one had sent; of a step that is moved its stream, entry, life, and the token that came with it
--   (0 = the life is over).
-- Returns {new, life, number, entry id} | {direct, life, entry id, version, owner, token} | {moved (before)} | {stored, life, number} | {gap, next number} | {old, last number} | {ended,
--   code, text, step} | {unknown} | {lost (it may be of a life whose owner is not that of its stream)} | {full}.
local function one(KEYS, ARGV)
local record = KEYS[1]
begin(ARGV[1], ARGV[2])
local name, flags, number, hash, frame, payload = ARGV[3], ARGV[4], tonumber(ARGV[5]), unpack(ARGV, 6, 8)
local timeout, limit, most, weight, about = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12]), ARGV[13]
local steps = steps_of(name)
local is_start, is_end = string.find(flags, 'S') ~= nil, string.find(flags, 'E') ~= nil
local of = load(name)
local is_open = of and of.state == 'open'
local by, sent = ARGV[14], tonumber(ARGV[15])
local stream, moved, of_life, of_token = ARGV[16], ARGV[17], tonumber(ARGV[18]), tonumber(ARGV[19])

if stream then
  if is_adopters(of, of_life) and stream ~= lane_of(of.version, of.owner) then return {'moved'} end
  if #redis.call('XRANGE', stream, moved, moved) == 0 then return {'moved'} end
  local life, n = string.match(redis.call('HGET', record, 'done:' .. moved) or '', '^(%d+)%.(%d+)$')
  if life then return {'stored', tonumber(life), tonumber(n)} end
  if of and of.tail ~= of_life then
    if of.by == by and sent < of.sent then return {'unknown'} end
    if of_token == 0 then return {'lost'} end
  end
end

local function append(life, n)
  local fields = {'f', frame, 'l', life, 'n', n, 'd', string.format('%.0f', now + timeout), 'o', of.token}
  if payload ~= '' then fields[11], fields[12] = 'p', payload end
  local entry = redis.call('XADD', steps, '*', unpack(fields))
  if stream then redis.call('XDEL', stream, moved) end
  if is_end and of.last == 0 then of.last = n end
  keep(of, of.idle + timeout + DAY_MS)
  if of.state == 'open' and of.life == life and of.owner ~= '' then
    tell(of, entry, life, n, 1, frame, payload)
  end
  return {'new', life, n, entry}
end

-- Returns nil if the owner's lane is closed, or the owner does not know that it owns the life.
local function append_direct()
  local lane = lane_of(of.version, of.owner)
  if stream == lane and (of_token == of.token or of_token == 0) then return nil end
  local owned = redis.call('SCARD', prefix .. 'sequence-owned:' .. of.owner)
  if limit > 0 and redis.call('XLEN', lane) >= limit * math.max(owned, 1) then return {'full'} end
  local fields = {'s', name, 'l', of.life, 't', of.token, 'm', limit, 'g', by, 'k', sent, 'f', frame}
  if payload ~= '' then fields[15], fields[16] = 'p', payload end
  local entry = redis.call('XADD', lane, 'NOMKSTREAM', '*', unpack(fields))
  if not entry then return nil end
  if stream then redis.call('XDEL', stream, moved) end
  -- A START is a repeated one only as long as no step follows it; the first that does comes here.
  if of.hash ~= '' and not is_start then write(of, {hash = ''}) end
  return {'direct', of.life, entry, of.version, of.owner, of.token}
end

local function is_repeated(n, committed)
  return n > 0 and n <= committed and has_answer(name, of.tail, n)
end

-- A tenant below its share is admitted even if others have filled the limit.
local function has_no_room()
  if most == 0 or redis.call('ZCARD', prefix .. 'sequences') < most then return false end
  local tenant, sum, tenants = tenant_of(name), 0, redis.call('HGETALL', prefix .. 'sequences~')
  for i = 1, #tenants, 2 do
    if tenants[i] ~= tenant then sum = sum + tonumber(tenants[i + 1]) end
  end
  local own = math.max(weight, 1)
  return tenant == '' or sum == 0 or redis.call('SCARD', prefix .. 'sequences~' .. tenant) * (sum + own) >= most * own
end

local is_full = limit > 0 and redis.call('XLEN', steps) >= limit

-- The content tells a repeated START from a new life.
local is_again = is_start and number == 1 and of and of.accepted == 1 and of.hash == hash
  and (is_open or is_repeated(1, of.committed))
if is_start and not is_again then
  if number > 1 then return {'gap', 1} end
  if is_full then return {'full'} end
  if not is_open then
    if has_no_room() then return {'full'} end
    local version, generation, kind, idle = string.match(about, '^(%S+) (%S+) (%S+) (%S+)$')
    local life, token, told = of and of.tail + 1 or 1, of and of.token or 0, of and of.number or 0
    of = fresh(name)
    for field, value in pairs({state = 'open', life = life, version = version, generation = generation, kind = kind,
      idle = tonumber(idle), token = token, number = told, by = by, sent = sent, weight = weight, era = era, tail = life, accepted = 1, hash = hash}) do of[field] = value end
    wait_for_owner(of, 'seq')
    return append(life, 1)
  end
  redis.call('HSETNX', record, 'last:' .. of.tail, of.last > 0 and of.last or of.accepted)
  local is_done = of.life == of.tail and not is_left(of)
    and (of.committed >= of.accepted or (of.kind == 'explicit' and not first_unanswered(of)))
  local life = of.tail + 1
  of.tail, of.accepted, of.hash, of.last, of.by, of.sent = life, 1, hash, 0, by, sent
  redis.call('HSET', record, 'next:' .. life, about)
  local answer = append(life, 1)
  if is_direct(of) then
    if not tell_restart(of) then hand_over(of, true) end
  elseif is_done then
    over(of, GRACE_MS)
  end
  return answer
end

if not of then return {'unknown'} end
if is_open and of.life == of.tail and is_direct(of) then
  local answer = append_direct()
  if answer then return answer end
  hand_over(of, true)
  is_open = of.state == 'open'
end
local committed = of.life == of.tail and of.committed or 0
if is_repeated(number, committed) then return {'stored', of.tail, number} end
if not is_open then
  if of.failed_life == of.life then return {'ended', of.code, of.text, of.failed} end
  return {'unknown'}
end
if number > 0 and number <= committed then return {'old', committed} end
if is_left(of) and of.life == of.tail then
  if is_full then return {'full'} end
  if of.last > 0 then return {'unknown'} end
  if not is_start then of.hash = '' end
  local n = number > 0 and number or of.accepted + 1
  if n == of.accepted + 1 then of.accepted = n end -- a gap may be in a closed lane
  return append(of.tail, n)
end
if number > of.accepted + 1 then return {'gap', of.accepted + 1} end
if is_full then return {'full'} end
if number > 0 and number <= of.accepted then return append(of.tail, number) end
if of.last > 0 then return {'unknown'} end
of.accepted = of.accepted + 1
return append(of.tail, of.accepted)
end
