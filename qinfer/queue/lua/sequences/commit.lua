-- Commits a step: stores state, response and number together if the worker still owns the sequence. The last step ends
-- the life. The previous response is kept until it is answered. An explicit sequence commits only numbered steps.
-- KEYS: record. ARGV: prefix, is_fragile, name, token, life, number, place of the state (none = unchanged | given |
--   staged), state or staged key, place and value of the response, flags (E = it ends the life, K = the response before it is
--   still needed), and the entry ('' = the next owner knows a repeated step by its number).
-- Returns {done | known (committed before) | lost (another owner) | gone (what was staged), unreferenced objects}.
local function one(KEYS, ARGV)
if not prefix then
  begin(ARGV[1], ARGV[2])
  make_room()
end
local name, token, life, n = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local staged_state, staged_answer = ARGV[7] == 'staged' and ARGV[8], ARGV[9] == 'staged' and ARGV[10]
local flags, entry, gone = ARGV[11] or '', ARGV[12] or '', {}

local function refuse(what)
  for _, staged in pairs({staged_state or nil, staged_answer or nil}) do drop(staged, gone) end
  return {what, gone}
end

local of = load(name)
local is_owner = of and of.token == token
local is_next = of and (n == of.committed + 1 or (of.kind == 'explicit' and n > of.committed))
if not is_owner or of.state ~= 'open' or not is_direct(of) or of.life ~= life or not is_next then
  local is_known = is_owner and (of.life > life or of.committed >= n) and has_answer(name, life, n)
  return refuse(is_known and 'known' or 'lost')
end
for _, staged in pairs({staged_state or nil, staged_answer or nil}) do
  if redis.call('EXISTS', staged) == 0 then return refuse('gone') end
end

local fields = {'at', life .. ' ' .. n}
local function put(key, staged, field, value)
  if not staged then
    fields[#fields + 1], fields[#fields + 2] = field, value
    return
  end
  redis.call('HDEL', KEYS[1], field)
  redis.call('RENAME', staged, key)
  redis.call('PEXPIRE', key, math.max(of.kept - now, of.idle + DAY_MS))
end
if ARGV[7] ~= 'none' then
  if of.apart == 1 then drop(state_of(name), gone) end
  of.apart = staged_state and 1 or 0
  put(state_of(name), staged_state, 'state', ARGV[8])
end
put(answer_of(name, life, n), staged_answer, answer_field(life, n), ARGV[10])

if life == of.tail then of.accepted = math.max(of.accepted, n) end
if entry ~= '' then fields[#fields + 1], fields[#fields + 2] = 'done:' .. entry, life .. '.' .. n end
if n > 1 and not string.find(flags, 'K') then drop_answer(name, life, n - 1, gone) end
write(of, {committed = n, deaths = 0, used = now}, unpack(fields))
if string.find(flags, 'E') then
  for _, object in ipairs(over(of, GRACE_MS)) do gone[#gone + 1] = object end
end
return {'done', gone}
end
